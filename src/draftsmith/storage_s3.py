"""The S3 store: any endpoint that keeps If-None-Match and If-Match on PUT (AWS, SeaweedFS, MinIO, R2 and others).

Credentials, region and endpoint come from AWS's own environment names only: AWS_ACCESS_KEY_ID,
AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_PROFILE, AWS_REGION or AWS_DEFAULT_REGION, AWS_ENDPOINT_URL_S3 or
AWS_ENDPOINT_URL; DRAFTSMITH_S3_TIMEOUT_S (300) says for how long a request that fails is sent again. Open it through
`draftsmith.storage.open_store`.

What is checked on the way: a PUT carries the crc32c of its body, which the server compares; a GET of a whole object is
compared with the checksum that the server keeps, crc32c for objects of ours, or else with the sha256 in the object's
metadata. Of a range only the length is checked. sha256 is computed once a PUT, and in no GET if the server keeps
checksums: readers compare it with a manifest anyway.
"""

from __future__ import annotations

import base64
import hashlib
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any

import google_crc32c
import numpy as np
from botocore.exceptions import BotoCoreError, ClientError, CredentialRetrievalError, ProfileNotFound
from botocore.httpchecksum import StreamingChecksumBody

from draftsmith.errors import ObjectChangedError, ObjectExistsError, ObjectMissingError, StoreError
from draftsmith.storage_base import STORE_VARIABLE, Content, ObjectInfo, check_path, check_prefix
from draftsmith.storage_s3_errors import (
    CREDENTIALS,
    ENDPOINT,
    ChecksumMismatchError,
    Place,
    PreconditionFailedError,
    StrangeAnswerError,
    error_code,
    error_status,
    is_silent,
)
from draftsmith.storage_s3_retry import Connection, Sender, Trials, ViewBody, limit_from_environment

MAX_PUT_BYTES = 5 * 1024**3


class S3Store:
    """A prefix of a bucket. Each object carries its sha256 in its metadata."""

    def __init__(self, *, bucket: str, prefix: str, place: Place, sender: Sender) -> None:
        self._bucket, self._prefix, self._place, self._sender = bucket, prefix, place, sender
        self._bucket_seen = False

    @classmethod
    def open(cls, uri: str) -> S3Store:
        """Make the client; no request is sent. Raises StoreError for a malformed address or environment."""
        bucket, _, rest = uri.removeprefix("s3://").partition("/")
        if not bucket:
            raise StoreError(
                "no bucket in the address of the store", got=uri, expected="s3://bucket/prefix", where=STORE_VARIABLE
            )
        prefix = check_prefix(rest)
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or None
        limit_s = limit_from_environment()
        try:
            connection = Connection(endpoint=endpoint, limit_s=limit_s)
        except (ProfileNotFound, CredentialRetrievalError) as error:
            text = " ".join(str(error).split())
            raise StoreError(f"cannot open store {uri}: {text}", where=CREDENTIALS) from None
        except (ValueError, BotoCoreError) as error:
            raise StoreError(f"cannot open store {uri}: {error}", where=ENDPOINT) from None
        place = Place(bucket, f"s3://{bucket}/{prefix}".rstrip("/"), endpoint or "AWS")
        return cls(bucket=bucket, prefix=prefix, place=place, sender=Sender(connection, place, limit_s=limit_s))

    @property
    def uri(self) -> str:
        return self._place.uri

    @property
    def retries(self) -> Mapping[str, int]:
        return self._sender.retries

    def get(self, path: str) -> bytes:
        return self._read(path, None)

    def get_range(self, path: str, *, start: int, length: int) -> bytes:
        if length == 0:
            return b""
        data = self._read(path, f"bytes={start}-{start + length - 1}")
        if len(data) != length:
            raise StoreError(
                f"{path} ends early", got=f"{len(data)} bytes at {start}", expected=f"{length}", where=self.uri
            )
        return data

    def head(self, path: str) -> ObjectInfo | None:
        asked = {"Bucket": self._bucket, "Key": self._key(path)}

        def request(client: Any) -> Any:
            try:
                return _with_etag(client.head_object(**asked))
            except ClientError as error:
                if is_silent(error):
                    # The same refusal of a request whose answer has a body says why.
                    client.list_objects_v2(Bucket=self._bucket, Prefix=asked["Key"], MaxKeys=1)
                raise

        try:
            answer = self._sender.send(request, action="look up", path=path)
        except ObjectMissingError:
            # A HEAD has no body, so a missing bucket looks like a missing object.
            self._check_bucket()
            return None
        self._bucket_seen = True
        return ObjectInfo(
            path,
            answer["ContentLength"],
            answer["ETag"].strip('"'),
            answer.get("Metadata", {}).get("sha256"),
            answer.get("VersionId"),
            answer["LastModified"].timestamp(),
        )

    def put(self, path: str, data: Content) -> ObjectInfo:
        return self._put(path, data, {})

    def put_if_absent(self, path: str, data: Content) -> ObjectInfo:
        try:
            return self._put(path, data, {"IfNoneMatch": "*"})
        except PreconditionFailedError:
            raise ObjectExistsError(f"{path} is in {self.uri} already") from None

    def put_if_match(self, path: str, data: Content, *, etag: str) -> ObjectInfo:
        try:
            return self._put(path, data, {"IfMatch": f'"{etag}"'})
        except (PreconditionFailedError, ObjectMissingError):
            raise ObjectChangedError(f"{path} in {self.uri} has changed", expected=f"ETag {etag}") from None

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        folder = check_prefix(prefix)
        start = self._key(folder) + "/" if folder else (f"{self._prefix}/" if self._prefix else "")
        found: list[Any] = []
        asked = {"Bucket": self._bucket, "Prefix": start}
        while True:
            page = self._sender.send(
                lambda client: client.list_objects_v2(**asked), action="list", path=folder or "the store"
            )
            found += page.get("Contents", [])
            if not page.get("IsTruncated"):
                break
            asked["ContinuationToken"] = page["NextContinuationToken"]
        skip = len(self._prefix) + 1 if self._prefix else 0
        # Sorted here: servers that keep folders do not list in plain byte order. Keys with a closing '/' are folders.
        for item in sorted(found, key=lambda item: item["Key"]):
            if not item["Key"].endswith("/"):
                path, etag = item["Key"][skip:], item["ETag"].strip('"')
                yield ObjectInfo(path, item["Size"], etag, None, None, item["LastModified"].timestamp())

    def delete(self, path: str, *, version_id: str | None = None) -> None:
        asked = {"Bucket": self._bucket, "Key": self._key(path)}
        if version_id is not None:
            asked["VersionId"] = version_id

        def request(client: Any) -> None:
            try:
                client.delete_object(**asked)
            except ClientError as error:
                # Some servers call it an error that the version is gone already, as after a lost answer.
                if error_code(error) != "NoSuchVersion":
                    raise

        self._sender.send(request, action="delete", path=path)

    def _key(self, path: str) -> str:
        return f"{self._prefix}/{check_path(path)}" if self._prefix else check_path(path)

    def _read(self, path: str, span: str | None) -> bytes:
        asked = {"Bucket": self._bucket, "Key": self._key(path)} | ({} if span is None else {"Range": span})

        def request(client: Any) -> bytes:
            answer = client.get_object(**asked)
            # Closed even if it is not read to its end: the connection would stay open.
            with closing(answer["Body"]) as body:
                data: bytes = body.read()
            _with_etag(answer)
            if span is None:
                _check(data, answer)
            return data

        return self._sender.send(request, action="read", path=path)

    def _put(self, path: str, data: Content, condition: dict[str, str]) -> ObjectInfo:
        """Write an object. A condition that does not hold may be this writer's own doing, when an answer was lost on
        the way: the sha256 of what is there tells. Raises PreconditionFailedError, or ObjectMissingError if there is
        nothing to match."""
        if len(data) > MAX_PUT_BYTES:
            raise StoreError(
                f"{path} is too large for one S3 object", got=f"{len(data)} bytes", expected=f"at most {MAX_PUT_BYTES}",
                where="params.yaml: cache.shard_tokens",
            )  # fmt: skip
        self._check_bucket()
        digest, trials = hashlib.sha256(data).hexdigest(), Trials()
        asked = {
            "Bucket": self._bucket,
            "Key": self._key(path),
            "Body": ViewBody(memoryview(data)) if len(data) else b"",
            "ChecksumCRC32C": base64.b64encode(_crc32c(data).to_bytes(4)).decode(),
            "Metadata": {"sha256": digest},
            **condition,
        }
        try:
            answer = self._sender.send(
                lambda client: _with_etag(client.put_object(**asked)), action="write", path=path, trials=trials
            )
        except (PreconditionFailedError, ObjectMissingError):
            there = self.head(path) if trials.num_uncertain else None
            if there is None or (there.sha256, there.size) != (digest, len(data)):
                raise
            return there
        etag, version = answer["ETag"].strip('"'), answer.get("VersionId")
        return ObjectInfo(path, len(data), etag, digest, version, time.time())

    def _check_bucket(self) -> None:
        """Once: raise StoreError if there is no such bucket; some servers make one of any name on a first write."""
        if self._bucket_seen:
            return

        def request(client: Any) -> bool:
            try:
                client.head_bucket(Bucket=self._bucket)
            except ClientError as error:
                # A HEAD says no more than its status. Whoever may write need not be allowed to ask: go on, and let
                # the request itself say what is wrong.
                if error_status(error) < 500 and error_status(error) != 429:
                    return error_status(error) != 404
                raise
            return True

        if not self._sender.send(request, action="look up bucket", path=self._bucket):
            raise self._place.no_bucket()
        self._bucket_seen = True


def _crc32c(data: Content) -> int:
    # google_crc32c takes no views, but arrays over them.
    return google_crc32c.value(np.frombuffer(data, dtype=np.uint8)) if len(data) else 0


def _with_etag(answer: Any) -> Any:
    """The answer, which names an object by its etag. Raises StrangeAnswerError if it does not."""
    if not answer.get("ETag"):
        raise StrangeAnswerError("an answer without an ETag")
    return answer


def _check(data: bytes, answer: Mapping[str, Any]) -> None:
    """Compare a whole object with the checksum that came with it. Raises ChecksumMismatchError.

    Of the server's checksums botocore has compared all but crc32c by now; those with a '-' are of an upload in parts.
    """
    told = answer.get("ChecksumCRC32C", "-")
    if "-" not in told:
        found = base64.b64encode(google_crc32c.value(data).to_bytes(4)).decode()
        if found != told:
            raise ChecksumMismatchError(f"{len(data)} bytes with crc32c {found}, not {told}")
        return
    known = answer.get("Metadata", {}).get("sha256")
    if known is not None and not isinstance(answer["Body"], StreamingChecksumBody):
        digest = hashlib.sha256(data).hexdigest()
        if digest != known:
            raise ChecksumMismatchError(f"{len(data)} bytes with sha256 {digest}, not {known}")
