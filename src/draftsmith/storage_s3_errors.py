"""What the failures of an S3 request mean: which may pass if it is sent again, and one clear line for all others."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,
    ConnectTimeoutError,
    CredentialRetrievalError,
    EndpointConnectionError,
    FlexibleChecksumError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    ParamValidationError,
    PartialCredentialsError,
    ReadTimeoutError,
    ResponseStreamingError,
    SSLError,
)
from botocore.parsers import ResponseParserError

from draftsmith.errors import ObjectMissingError, StoreError
from draftsmith.storage_base import STORE_VARIABLE

CREDENTIALS = "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_PROFILE"
ENDPOINT = "AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL"
REGION = "AWS_REGION or AWS_DEFAULT_REGION"

# Reasons of a retry, as they are counted and told.
SLOW_DOWN = "slow down"
SERVER_ERROR = "server error"
TIMEOUT = "timeout"
CONNECTION = "connection"
TRUNCATED = "truncated body"
CHECKSUM = "checksum mismatch"
DAMAGED = "damaged answer"
CONFLICT = "conflict"
EXPIRED = "expired credentials"
REPLACED = "replaced credentials"

# Failures of which it is sure that the request has done nothing.
WITHOUT_EFFECT = frozenset({CONFLICT, EXPIRED, REPLACED})

_SLOW_DOWN = {
    "SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "BandwidthLimitExceeded", "Busy",
    "TooManyRequests", "TooManyRequestsException", "SlowDownRead", "SlowDownWrite",
}  # fmt: skip
_TIMEOUT = {"RequestTimeout", "RequestTimeoutException"}
_TRUNCATED = {"IncompleteBody"}
_CHECKSUM = {"BadDigest", "XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch"}
_CONFLICT = {"ConditionalRequestConflict", "OperationAborted", "409"}
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "InvalidToken", "RequestExpired", "TokenRefreshRequired"}
_WRONG_KEY = {"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidClientTokenId"}
_NOT_FOUND = {"NoSuchKey", "404", "NotFound"}
_REFUSED = {"AccessDenied", "403", "Forbidden", "AllAccessDisabled", "AccountProblem"}
_OTHER_REGION = {"PermanentRedirect", "301", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"}
_FULL = {"InsufficientStorage", "507", "QuotaExceeded", "XMinioStorageFull", "EntityTooLarge"}
# Server errors that no repetition mends: not implemented, no such HTTP version, full, loops, and the like.
_LASTING = {501, 505, 507, 508, 510, 511}


class PreconditionFailedError(StoreError):
    """The server refused a conditional write because its condition does not hold."""


class ChecksumMismatchError(Exception):
    """An object's bytes are not those that its checksum, or the sha256 in its metadata, names."""


class StrangeAnswerError(Exception):
    """An answer that no S3 server gives, such as the log-in page of a network."""


# Everything that a request may raise; others are faults of this program.
RAISED = (BotoCoreError, ClientError, ResponseParserError, ChecksumMismatchError, StrangeAnswerError, OSError)


def passing_reason(error: Exception) -> str | None:
    """Why the request failed, if it may well succeed when it is sent again; None for what lasts."""
    if isinstance(error, ClientError):
        return _told_reason(error)
    if isinstance(error, SSLError | NoCredentialsError | PartialCredentialsError | ParamValidationError):
        return None
    if isinstance(error, ReadTimeoutError | ConnectTimeoutError | TimeoutError):
        return TIMEOUT
    if isinstance(error, IncompleteReadError | ResponseStreamingError):
        return TRUNCATED
    if isinstance(error, FlexibleChecksumError | ChecksumMismatchError):
        return CHECKSUM
    if isinstance(error, ResponseParserError | StrangeAnswerError):
        return DAMAGED
    if isinstance(error, CredentialRetrievalError):
        return EXPIRED
    if isinstance(error, ConnectionError | HTTPClientError | OSError):
        return CONNECTION
    return None


def _told_reason(error: ClientError) -> str | None:
    code, status = error_code(error), error_status(error)
    table = (
        (_SLOW_DOWN, SLOW_DOWN),
        (_TIMEOUT, TIMEOUT),
        (_TRUNCATED, TRUNCATED),
        (_CHECKSUM, CHECKSUM),
        (_CONFLICT, CONFLICT),
        (_EXPIRED, EXPIRED),
    )
    for codes, reason in table:
        if code in codes:
            return reason
    if status in (429, 503):
        return SLOW_DOWN
    if status == 408:
        return TIMEOUT
    return SERVER_ERROR if status >= 500 and status not in _LASTING and code not in _FULL else None


def is_wrong_key(error: Exception) -> bool:
    """True if the server does not know the key, or the signature does not fit: final, unless there is another key."""
    return isinstance(error, ClientError) and error_code(error) in _WRONG_KEY


def is_silent(error: Exception) -> bool:
    """True for the refusal of a HEAD: it has no body, so that expired credentials look like any other reason."""
    return isinstance(error, ClientError) and error_code(error) in ("400", "403")


def is_unreached(error: Exception) -> bool:
    """True if nobody answered at the address at all, as where the address is wrong."""
    return isinstance(error, EndpointConnectionError | ConnectTimeoutError)


def error_code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", "unknown"))


def error_status(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def retry_after_s(error: Exception) -> float:
    """How long the server asks to wait (its Retry-After, in seconds or as a date); 0 if it does not say."""
    if not isinstance(error, ClientError):
        return 0.0
    text = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("retry-after", "")
    try:
        return max(0.0, float(text))
    except ValueError:
        pass
    try:
        then = parsedate_to_datetime(text)
    except ValueError:
        return 0.0
    then = then if then.tzinfo is not None else then.replace(tzinfo=UTC)
    return max(0.0, (then - datetime.now(UTC)).total_seconds())


@dataclass(frozen=True)
class Place:
    """A bucket and prefix at an endpoint, for messages."""

    bucket: str
    uri: str
    host: str

    def no_bucket(self) -> StoreError:
        where = f"{STORE_VARIABLE}, {ENDPOINT}"
        return StoreError(
            f"no bucket {self.bucket}", got=self.uri, expected=f"a bucket that exists at {self.host}", where=where
        )

    def explain(self, error: Exception, *, action: str, path: str) -> StoreError:
        """The clear line for what a request raised. `action` is as in `cannot read PATH`."""
        if isinstance(error, ClientError):
            return self._explain_answer(error, action, path)
        what, text = f"cannot {action} {path} in store {self.uri}", " ".join(str(error).split())
        if isinstance(error, NoCredentialsError | PartialCredentialsError):
            return StoreError(f"no credentials for store {self.uri}: {text}", where=CREDENTIALS)
        if isinstance(error, CredentialRetrievalError):
            return StoreError(what, got=text, expected="credentials", where=CREDENTIALS)
        if isinstance(error, ParamValidationError):
            return StoreError(f"{what}: {text}", where=STORE_VARIABLE)
        if isinstance(error, FlexibleChecksumError | ChecksumMismatchError):
            return StoreError(
                f"{path} in store {self.uri} is damaged", got=text, expected="the bytes that were written"
            )
        if isinstance(error, ResponseParserError | StrangeAnswerError):
            return StoreError(what, got=f"an answer that is not S3's: {text[:200]}", where=ENDPOINT)
        if isinstance(error, ConnectionError | HTTPClientError | IncompleteReadError):
            return StoreError(f"cannot reach store {self.uri} at {self.host}: {text}", where=ENDPOINT)
        return StoreError(f"{what}: {text}", where=f"{CREDENTIALS}; {ENDPOINT}")

    def _explain_answer(self, error: ClientError, action: str, path: str) -> StoreError:
        code, status = error_code(error), error_status(error)
        told = error.response.get("Error", {}).get("Message", "")
        what = f"cannot {action} {path} in store {self.uri}"
        if code in ("PreconditionFailed", "412"):
            return PreconditionFailedError(f"{path} in {self.uri}", got="another object than was expected")
        if code in _CONFLICT:
            return StoreError(f"{path} in {self.uri} is being written by others all the time", expected="to run again")
        if code == "NoSuchBucket":
            return self.no_bucket()
        if code in _NOT_FOUND:
            return ObjectMissingError(f"no object {path} in store {self.uri}")
        if code in ("InvalidRange", "416"):
            return StoreError(f"{path} ends early", got="no byte of the range asked for", where=self.uri)
        if code in _WRONG_KEY or code in _EXPIRED:
            return StoreError(what, got=f"{code} from {self.host}", expected="valid credentials", where=CREDENTIALS)
        if code in _REFUSED:
            expected = "valid credentials that may do this"
            return StoreError(what, got=f"access denied by {self.host}", expected=expected, where=CREDENTIALS)
        if code in _OTHER_REGION:
            return StoreError(what, got=f"{code}: {told}", expected=f"the region of bucket {self.bucket}", where=REGION)
        if code == "RequestTimeTooSkewed":
            return StoreError(what, got=told or code, expected="a clock that is right", where="this machine's time")
        if code in _FULL or status == 507:
            return StoreError(what, got=f"{code}: {told}", expected="a store with room", where=self.host)
        if status >= 500 or status == 429:
            return StoreError(
                what, got=f"{code} ({status}) from {self.host}", expected="a server in order; run again later"
            )
        return StoreError(what, got=f"{code}: {told}" if told else code, where=f"{STORE_VARIABLE}, {ENDPOINT}")
