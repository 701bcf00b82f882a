"""The S3 store: any endpoint that keeps If-None-Match and If-Match on PUT (AWS, SeaweedFS, MinIO, R2 and others).

Credentials, region and endpoint come from AWS's own environment names only: AWS_ACCESS_KEY_ID,
AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_PROFILE, AWS_REGION or AWS_DEFAULT_REGION, AWS_ENDPOINT_URL_S3 or
AWS_ENDPOINT_URL, and AWS_MAX_ATTEMPTS (3) for how often a request is tried. Open it through
`draftsmith.storage.open_store`.
"""

from __future__ import annotations

import base64
import hashlib
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,
    ConnectTimeoutError,
    HTTPClientError,
    NoCredentialsError,
    ParamValidationError,
    PartialCredentialsError,
    ProfileNotFound,
    ReadTimeoutError,
)

from draftsmith.errors import ObjectChangedError, ObjectExistsError, ObjectMissingError, StoreError
from draftsmith.storage_base import STORE_VARIABLE, ObjectInfo, check_path, check_prefix

CREDENTIALS = "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_PROFILE"
ENDPOINT = "AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL"
REGION = "AWS_REGION or AWS_DEFAULT_REGION"
MAX_PUT_BYTES = 5 * 1024**3
CONFLICT_RETRIES = 5
READ_ATTEMPTS = 3

_NOT_FOUND = {"NoSuchKey", "404", "NotFound"}
_WRONG_KEY = {"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "ExpiredToken", "InvalidClientTokenId"}
_REFUSED = {"AccessDenied", "403", "Forbidden", "AllAccessDisabled", "AccountProblem"}
_OTHER_REGION = {"PermanentRedirect", "301", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"}
_FULL = {"InsufficientStorage", "507", "QuotaExceeded", "XMinioStorageFull", "EntityTooLarge"}
_CONFLICT = {"ConditionalRequestConflict", "OperationAborted", "409"}


class _PreconditionFailed(StoreError):
    """The server refused a conditional write because its condition does not hold."""


class _Conflict(StoreError):
    """The server refused a conditional write because another one is under way."""


class S3Store:
    """A prefix of a bucket. Each object carries its sha256 in its metadata, checked by the server as it arrives."""

    def __init__(self, *, bucket: str, prefix: str, client: Any, endpoint: str | None) -> None:
        self._bucket, self._prefix, self._client, self._endpoint = bucket, prefix, client, endpoint
        self._bucket_seen = False

    @classmethod
    def open(cls, uri: str) -> S3Store:
        """Make the client; no request is sent. Raises StoreError for a malformed address or environment."""
        bucket, _, prefix = uri.removeprefix("s3://").partition("/")
        if not bucket:
            raise StoreError(
                "no bucket in the address of the store", got=uri, expected="s3://bucket/prefix", where=STORE_VARIABLE
            )
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or None
        # Servers other than AWS seldom resolve bucket.host names.
        style = "path" if endpoint is not None and "amazonaws.com" not in endpoint else "auto"
        try:
            session = boto3.session.Session(region_name=os.environ.get("AWS_REGION") or None)
            config = Config(
                retries={"mode": "standard"},
                connect_timeout=5,
                read_timeout=60,
                max_pool_connections=16,
                s3={"addressing_style": style},
            )
            region = session.region_name or "us-east-1"
            client = session.client("s3", region_name=region, endpoint_url=endpoint, config=config)
        except ProfileNotFound as error:
            raise StoreError(f"cannot open store {uri}: {error}", where="AWS_PROFILE") from None
        except (ValueError, BotoCoreError) as error:
            raise StoreError(f"cannot open store {uri}: {error}", where=ENDPOINT) from None
        return cls(bucket=bucket, prefix=check_prefix(prefix), client=client, endpoint=endpoint)

    @property
    def uri(self) -> str:
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

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
        try:
            with self._errors("look up", path):
                answer = self._client.head_object(Bucket=self._bucket, Key=self._key(path))
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

    def put(self, path: str, data: bytes) -> ObjectInfo:
        return self._put(path, data, {})

    def put_if_absent(self, path: str, data: bytes) -> ObjectInfo:
        try:
            return self._put(path, data, {"IfNoneMatch": "*"})
        except _PreconditionFailed:
            raise ObjectExistsError(f"{path} is in {self.uri} already") from None

    def put_if_match(self, path: str, data: bytes, *, etag: str) -> ObjectInfo:
        try:
            return self._put(path, data, {"IfMatch": f'"{etag}"'})
        except (_PreconditionFailed, ObjectMissingError):
            raise ObjectChangedError(f"{path} in {self.uri} has changed", expected=f"ETag {etag}") from None

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        folder = check_prefix(prefix)
        start = self._key(folder) + "/" if folder else (f"{self._prefix}/" if self._prefix else "")
        found = []
        with self._errors("list", folder or "the store"):
            for page in self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=start):
                found += page.get("Contents", [])
        skip = len(self._prefix) + 1 if self._prefix else 0
        # Sorted here: servers that keep folders do not list in plain byte order. Keys with a closing '/' are folders.
        for item in sorted(found, key=lambda item: item["Key"]):
            if not item["Key"].endswith("/"):
                path, etag = item["Key"][skip:], item["ETag"].strip('"')
                yield ObjectInfo(path, item["Size"], etag, None, None, item["LastModified"].timestamp())

    def delete(self, path: str, *, version_id: str | None = None) -> None:
        version = {} if version_id is None else {"VersionId": version_id}
        with self._errors("delete", path):
            self._client.delete_object(Bucket=self._bucket, Key=self._key(path), **version)

    @property
    def retries(self) -> Mapping[str, int]:
        return {}

    def _key(self, path: str) -> str:
        return f"{self._prefix}/{check_path(path)}" if self._prefix else check_path(path)

    def _read(self, path: str, span: str | None) -> bytes:
        """Read a body; a connection that breaks inside one is outside botocore's own retries, so try again here."""
        asked = {"Bucket": self._bucket, "Key": self._key(path)} | ({} if span is None else {"Range": span})
        for attempt in range(READ_ATTEMPTS):
            with self._errors("read", path):
                answer = self._client.get_object(**asked)
                try:
                    data: bytes = answer["Body"].read()
                except (BotoCoreError, OSError):
                    if attempt == READ_ATTEMPTS - 1:
                        raise
                    continue
                return data
        raise AssertionError("the last attempt returns or raises")

    def _put(self, path: str, data: bytes, condition: dict[str, str]) -> ObjectInfo:
        if len(data) > MAX_PUT_BYTES:
            raise StoreError(
                f"{path} is too large for one S3 object", got=f"{len(data)} bytes", expected=f"at most {MAX_PUT_BYTES}",
                where="params.yaml: cache.shard_tokens",
            )  # fmt: skip
        self._check_bucket()
        digest = hashlib.sha256(data)
        for attempt in range(CONFLICT_RETRIES):
            try:
                with self._errors("write", path, conditional=bool(condition)):
                    answer = self._client.put_object(
                        Bucket=self._bucket,
                        Key=self._key(path),
                        Body=data,
                        ChecksumSHA256=base64.b64encode(digest.digest()).decode(),
                        Metadata={"sha256": digest.hexdigest()},
                        **condition,
                    )
                break
            except _Conflict:
                # Another conditional write of the same object is under way; who won is known a moment later.
                if attempt == CONFLICT_RETRIES - 1:
                    raise
                time.sleep(0.05 * 2**attempt)
        etag, version = answer["ETag"].strip('"'), answer.get("VersionId")
        return ObjectInfo(path, len(data), etag, digest.hexdigest(), version, time.time())

    def _check_bucket(self) -> None:
        """Once: raise StoreError if there is no such bucket; some servers make one of any name on a first write."""
        if self._bucket_seen:
            return
        with self._errors("look up bucket", self._bucket):
            try:
                self._client.head_bucket(Bucket=self._bucket)
            except ClientError as error:
                # A HEAD says no more than its status. Whoever may write need not be allowed to ask: go on, and let
                # the request itself say what is wrong.
                if error.response["ResponseMetadata"]["HTTPStatusCode"] == 404:
                    raise self._no_bucket() from None
        self._bucket_seen = True

    def _no_bucket(self) -> StoreError:
        where = f"{STORE_VARIABLE}, {ENDPOINT}"
        return StoreError(
            f"no bucket {self._bucket}", got=self.uri, expected=f"a bucket that exists at {self._host}", where=where
        )

    @property
    def _host(self) -> str:
        return self._endpoint or "AWS"

    @contextmanager
    def _errors(self, action: str, path: str, *, conditional: bool = False) -> Iterator[None]:
        """Turn what botocore raises into one clear line."""
        try:
            yield
        except ClientError as error:
            raise self._translate(error, action, path, conditional) from None
        except (NoCredentialsError, PartialCredentialsError) as error:
            raise StoreError(f"no credentials for store {self.uri}: {error}", where=CREDENTIALS) from None
        except ParamValidationError as error:
            text = " ".join(str(error).split())
            raise StoreError(f"cannot {action} {path} in store {self.uri}: {text}", where=STORE_VARIABLE) from None
        except (ConnectionError, ConnectTimeoutError, ReadTimeoutError, HTTPClientError) as error:
            text = " ".join(str(error).split())
            raise StoreError(f"cannot reach store {self.uri} at {self._host}: {text}", where=ENDPOINT) from None
        except (BotoCoreError, OSError) as error:
            text = " ".join(str(error).split())
            raise StoreError(
                f"cannot {action} {path} in store {self.uri}: {text}", where=f"{CREDENTIALS}; {ENDPOINT}"
            ) from None

    def _translate(self, error: ClientError, action: str, path: str, conditional: bool) -> StoreError:
        code = error.response.get("Error", {}).get("Code", "unknown")
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        told = error.response.get("Error", {}).get("Message", "")
        what = f"cannot {action} {path} in store {self.uri}"
        if code in ("PreconditionFailed", "412") and conditional:
            return _PreconditionFailed(f"{path} in {self.uri}")
        if code in _CONFLICT and conditional:
            return _Conflict(f"{path} in {self.uri} is being written by others all the time", expected="to run again")
        if code == "NoSuchBucket":
            return self._no_bucket()
        if code in _NOT_FOUND:
            return ObjectMissingError(f"no object {path} in store {self.uri}")
        if code in ("InvalidRange", "416"):
            return StoreError(f"{path} ends early", got="no byte of the range asked for", where=self.uri)
        if code in _WRONG_KEY:
            return StoreError(what, got=f"{code} from {self._host}", expected="valid credentials", where=CREDENTIALS)
        if code in _REFUSED:
            return StoreError(
                what,
                got=f"access denied by {self._host}",
                expected="valid credentials that may do this",
                where=CREDENTIALS,
            )
        if code in _OTHER_REGION:
            return StoreError(
                what, got=f"{code}: {told}", expected=f"the region of bucket {self._bucket}", where=REGION
            )
        if code == "RequestTimeTooSkewed":
            return StoreError(what, got=told or code, expected="a clock that is right", where="this machine's time")
        if code in _FULL or status == 507:
            return StoreError(what, got=f"{code}: {told}", expected="a store with room", where=self._host)
        if status >= 500:
            return StoreError(
                what, got=f"{code} ({status}) from {self._host}", expected="a server in order; run again later"
            )
        return StoreError(what, got=f"{code}: {told}" if told else code, where=f"{STORE_VARIABLE}, {ENDPOINT}")
