"""The one retry loop around S3 requests, and the client with its credentials. botocore's own retries are off.

A request that failed in a way that may pass is sent again after a random pause between 0 and a bound that doubles each
time (full jitter), or after what the server's Retry-After asks for. It is given up when it has been failing for
DRAFTSMITH_S3_TIMEOUT_S seconds; a body that is slow but still arriving is not cut off. Every repetition is counted.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from draftsmith.errors import StoreError
from draftsmith.storage_base import describe_retries
from draftsmith.storage_s3_errors import (
    CHECKSUM,
    EXPIRED,
    RAISED,
    REPLACED,
    WITHOUT_EFFECT,
    Place,
    error_code,
    error_status,
    is_unreached,
    is_wrong_key,
    passing_reason,
    retry_after_s,
)

LIMIT_VARIABLE = "DRAFTSMITH_S3_TIMEOUT_S"
DEFAULT_LIMIT_S = 300.0
# An address at which nobody has ever answered is more likely wrong than down.
UNREACHED_LIMIT_S = 5.0
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 20.0
CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 60.0
CONNECTIONS = 32
# From here on a user who waits is told why.
TELL_AFTER_S = 10.0

T = TypeVar("T")
_LOG = logging.getLogger(__name__)


def limit_from_environment() -> float:
    """DRAFTSMITH_S3_TIMEOUT_S in seconds. Raises StoreError for anything but a number > 0."""
    text = os.environ.get(LIMIT_VARIABLE, "")
    try:
        limit_s = float(text) if text else DEFAULT_LIMIT_S
    except ValueError:
        limit_s = 0.0
    if not 0 < limit_s < float("inf"):
        raise StoreError("not a time limit", got=repr(text), expected="seconds > 0", where=LIMIT_VARIABLE)
    return limit_s


class Connection:
    """A boto3 client that is made anew when the credentials it was made with have been replaced. Thread-safe."""

    def __init__(self, *, endpoint: str | None, limit_s: float) -> None:
        """Make the client; no request is sent. Raises ProfileNotFound, ValueError and BotoCoreError."""
        self._endpoint, self._limit_s = endpoint, limit_s
        self._lock = threading.Lock()
        self._session = _new_session()
        self._client = self._new_client()

    @property
    def client(self) -> Any:
        return self._client

    def renew(self, used: Any) -> bool:
        """Read the credentials again. True if the client is another than `used` now; it never is for credentials in
        the environment of this process. Raises BotoCoreError."""
        with self._lock:
            if self._client is not used:
                return True
            session = _new_session()
            if _frozen(session) == _frozen(self._session):
                return False
            before = self._session
            self._session = session
            try:
                self._client = self._new_client()
            except (ValueError, BotoCoreError):
                self._session = before
                raise
        _LOG.warning("read new credentials for S3 (%s)", session.get_credentials().method)
        return True

    def can_change(self) -> bool:
        """True if credentials may be replaced while this process runs: a file's, a role's; not the environment's."""
        credentials = self._session.get_credentials()
        return credentials is not None and credentials.method != "env"

    def _new_client(self) -> Any:
        # Servers other than AWS seldom resolve bucket.host names.
        style = "path" if self._endpoint is not None and "amazonaws.com" not in self._endpoint else "auto"
        config = Config(
            retries={"mode": "standard", "total_max_attempts": 1},
            # One request that hangs must leave time for others within the limit.
            connect_timeout=min(CONNECT_TIMEOUT_S, self._limit_s / 4),
            read_timeout=min(READ_TIMEOUT_S, self._limit_s / 4),
            max_pool_connections=CONNECTIONS,
            request_checksum_calculation="when_required",
            response_checksum_validation="when_supported",
            # The body's checksum is a signed header, so signing the body as well would only hash it once more.
            s3={"addressing_style": style, "payload_signing_enabled": False},
        )
        region = self._session.region_name or "us-east-1"
        client = self._session.client("s3", region_name=region, endpoint_url=self._endpoint, config=config)
        client.meta.events.register_first("before-call.s3.PutObject", _send_view)
        return client


class ViewBody:
    """A body to send from the memory where it lies: botocore takes no views, and copies of objects are dear."""

    def __init__(self, view: memoryview) -> None:
        self.view = view

    def read(self) -> bytes:
        """botocore asks for this before it takes anything for a body; nobody calls it."""
        return bytes(self.view)


def _send_view(params: dict[str, Any], **_: object) -> None:
    """Put the memory itself in the place of a ViewBody: what sends the request takes any buffer."""
    if isinstance(params["body"], ViewBody):
        params["body"] = params["body"].view


def _new_session() -> boto3.session.Session:
    return boto3.session.Session(region_name=os.environ.get("AWS_REGION") or None)


def _frozen(session: boto3.session.Session) -> tuple[str, str, str | None] | None:
    credentials = session.get_credentials()
    if credentials is None:
        return None
    frozen = credentials.get_frozen_credentials()
    return frozen.access_key, frozen.secret_key, frozen.token


@dataclass
class Trials:
    """How the sending of one request went: failures after which it may have been carried out all the same."""

    num_uncertain: int = 0


class Sender:
    """Sends the requests of one store until they succeed, cannot succeed, or have failed for too long. Thread-safe."""

    def __init__(self, connection: Connection, place: Place, *, limit_s: float) -> None:
        self._connection, self._place, self._limit_s = connection, place, limit_s
        self._retries: Counter[str] = Counter()
        self._lock = threading.Lock()
        # Not the shared generator: forked processes would all wait equally long.
        self._random = random.SystemRandom()
        self._reached = False

    @property
    def retries(self) -> Mapping[str, int]:
        """Reason -> number of repetitions so far, a copy."""
        with self._lock:
            return dict(self._retries)

    def send(self, request: Callable[[Any], T], *, action: str, path: str, trials: Trials | None = None) -> T:
        """What `request(client)` returns. `action` and `path` are as in `cannot read PATH`; `trials` is filled in.

        Raises StoreError: what the server refuses for good, or after DRAFTSMITH_S3_TIMEOUT_S of failures.
        """
        failures: Counter[str] = Counter()
        failing_since, damage = 0.0, ""
        while True:
            client = self._connection.client
            try:
                answer = request(client)
            except RAISED as error:
                failure: Exception = error
            else:
                self._reached = True
                return answer
            now = time.monotonic()
            failing_since = failing_since or now
            self._reached = self._reached or isinstance(failure, ClientError)
            reason = self._reason(failure, client)
            # The same wrong bytes read twice in a row lie in the store; no repetition mends them.
            seen = str(failure) if reason == CHECKSUM and not isinstance(failure, ClientError) else ""
            lies_there, damage = seen != "" and seen == damage, seen
            if reason is None or lies_there:
                raise self._place.explain(failure, action=action, path=path) from None
            failures[reason] += 1
            if trials is not None and reason not in WITHOUT_EFFECT:
                trials.num_uncertain += 1
            failing_s = now - failing_since
            left_s = self._limit(failure) - failing_s
            asked_s = retry_after_s(failure)
            if left_s <= 0 or asked_s > left_s:
                raise self._given_up(failure, failures, failing_s, asked_s, action, path) from None
            bound_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(failures.total() - 1, 20))
            pause_s = min(max(asked_s, self._random.uniform(0, bound_s)), left_s)
            level = logging.WARNING if failing_s > TELL_AFTER_S else logging.INFO
            _LOG.log(level, "cannot %s %s yet (%s); again in %.1f s", action, path, told(failure), pause_s)
            with self._lock:
                self._retries[reason] += 1
            time.sleep(pause_s)

    def _reason(self, failure: Exception, client: Any) -> str | None:
        """Why to send again, or None; looks for new credentials where old ones are the trouble."""
        reason = passing_reason(failure)
        if reason != EXPIRED and not is_wrong_key(failure):
            return reason
        try:
            renewed = self._connection.renew(client)
        except (BotoCoreError, OSError, ValueError):
            # A file that is being replaced, or a server of credentials that is away for a moment.
            renewed = False
        if reason is None:
            return REPLACED if renewed else None
        return reason if renewed or self._connection.can_change() else None

    def _limit(self, failure: Exception) -> float:
        """How long this kind of failure may last, in seconds."""
        if is_unreached(failure) and not self._reached:
            return min(self._limit_s, UNREACHED_LIMIT_S)
        return self._limit_s

    def _given_up(
        self, failure: Exception, failures: Counter[str], failing_s: float, asked_s: float, action: str, path: str
    ) -> StoreError:
        if is_unreached(failure) and not self._reached:
            return self._place.explain(failure, action=action, path=path)
        asked = f"; the server asks to wait {asked_s:.0f} s" if asked_s else ""
        return StoreError(
            f"cannot {action} {path} in store {self._place.uri}",
            got=f"{failures.total()} failures in {failing_s:.1f} s ({describe_retries(failures)}); "
            f"the last: {told(failure)}{asked}",
            expected=f"an answer within {self._limit_s:g} s",
            where=LIMIT_VARIABLE,
        )


def told(failure: Exception) -> str:
    """A failure in a few words."""
    if isinstance(failure, ClientError):
        return f"{error_code(failure)} ({error_status(failure)})"
    return " ".join(str(failure).split())[:200]
