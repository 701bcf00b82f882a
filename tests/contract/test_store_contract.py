"""What every store must do; a new store inherits StoreContract and gives a `store_uri`."""

from __future__ import annotations

import hashlib
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from draftsmith.errors import ObjectChangedError, ObjectExistsError, ObjectMissingError, StoreError
from draftsmith.storage import Store, check_store, copy_prefix, open_store
from draftsmith.storage_disk import DiskCache
from tests.s3 import S3Bucket

WRITERS = 8


class StoreContract:
    """The suite. `store_uri` is the address of an empty store that the process may write."""

    @pytest.fixture
    def store(self, store_uri: str) -> Store:
        return open_store(store_uri)

    @pytest.fixture
    def second(self, store_uri: str) -> Store:
        """The same store, opened again as another process would."""
        return open_store(store_uri)

    def test_what_is_put_is_got(self, store: Store, second: Store) -> None:
        data = os.urandom(3_000_001)
        before = time.time()
        info = store.put("a/b/c.bin", data)
        assert second.get("a/b/c.bin") == data
        assert second.get_range("a/b/c.bin", start=1_000_000, length=77) == data[1_000_000:1_000_077]
        there = second.head("a/b/c.bin")
        assert there is not None
        assert (there.path, there.size) == ("a/b/c.bin", 3_000_001)
        assert info.sha256 == there.sha256 == hashlib.sha256(data).hexdigest()
        assert info.etag == there.etag
        assert before - 5 < there.modified_s < time.time() + 5

    def test_empty_object(self, store: Store) -> None:
        store.put("empty", b"")
        assert store.get("empty") == b""
        assert [(item.path, item.size) for item in store.list("")] == [("empty", 0)]

    def test_views_of_buffers_that_are_used_again(self, store: Store) -> None:
        """The shards of a cache are written from such."""
        buffer = bytearray(os.urandom(100_000))
        view, written = memoryview(buffer)[1000:90_000], bytes(buffer[1000:90_000])
        info = store.put("put", view)
        assert (info.size, info.sha256) == (89_000, hashlib.sha256(written).hexdigest())
        absent = store.put_if_absent("absent", view)
        match = store.put_if_match("match", view, etag=store.put("match", b"1").etag)
        buffer[:] = bytes(100_000)
        assert absent.sha256 == match.sha256 == info.sha256
        assert [store.get(path) for path in ("put", "absent", "match")] == [written] * 3

    def test_what_was_read_is_read_anew_after_a_change(self, store: Store, second: Store) -> None:
        etag = store.put("x", b"first").etag
        assert store.get("x") == second.get("x") == b"first"
        second.put_if_match("x", b"other", etag=etag)
        assert store.get("x") == b"other"
        second.delete("x")
        with pytest.raises(ObjectMissingError):
            store.get("x")

    def test_nothing_was_done_again(self, store: Store) -> None:
        store.put("x", b"1")
        assert store.get("x") == b"1"
        assert dict(store.retries) == {}

    def test_put_replaces(self, store: Store) -> None:
        first, second = store.put("x", b"first"), store.put("x", b"second")
        assert store.get("x") == b"second"
        assert first.etag != second.etag

    def test_missing_object(self, store: Store) -> None:
        assert store.head("no/such") is None
        for read in (lambda: store.get("no/such"), lambda: store.get_range("no/such", start=0, length=1)):
            with pytest.raises(ObjectMissingError) as caught:
                read()
            assert "no/such" in str(caught.value)
            assert store.uri in str(caught.value)

    def test_folder_is_no_object(self, store: Store) -> None:
        store.put("a/b", b"1")
        assert store.head("a") is None
        with pytest.raises(ObjectMissingError):
            store.get("a")

    @pytest.mark.parametrize(("start", "length"), [(3, 3), (4, 1), (5, 5), (100, 1)])
    def test_range_past_the_end(self, store: Store, start: int, length: int) -> None:
        store.put("five", b"12345"[:4])
        with pytest.raises(StoreError, match="five ends early"):
            store.get_range("five", start=start, length=length)

    def test_put_if_absent(self, store: Store, second: Store) -> None:
        info = store.put_if_absent("x", b"first")
        with pytest.raises(ObjectExistsError, match="x is in"):
            second.put_if_absent("x", b"second")
        assert second.get("x") == b"first"
        there = second.head("x")
        assert there is not None
        assert there.etag == info.etag

    def test_put_if_match(self, store: Store, second: Store) -> None:
        first = store.put("x", b"first")
        after = second.put_if_match("x", b"after", etag=first.etag)
        with pytest.raises(ObjectChangedError):
            store.put_if_match("x", b"too late", etag=first.etag)
        assert store.get("x") == b"after"
        store.put_if_match("x", b"again", etag=after.etag)
        assert second.get("x") == b"again"

    def test_put_if_match_of_a_missing_object(self, store: Store) -> None:
        etag = store.put("x", b"1").etag
        store.delete("x")
        with pytest.raises(ObjectChangedError):
            store.put_if_match("x", b"2", etag=etag)
        assert store.head("x") is None

    def test_one_of_many_writers_wins(self, store: Store) -> None:
        """Two races: for an absent object, then for the replacement of the winner's."""

        def write(number: int) -> bytes | None:
            try:
                store.put_if_absent("raced", f"absent {number}".encode())
            except ObjectExistsError:
                return None
            return f"absent {number}".encode()

        with ThreadPoolExecutor(WRITERS) as pool:
            winners = [won for won in pool.map(write, range(WRITERS)) if won is not None]
        assert winners == [store.get("raced")]
        there = store.head("raced")
        assert there is not None

        def replace(number: int) -> bytes | None:
            try:
                store.put_if_match("raced", f"match {number}".encode(), etag=there.etag)
            except ObjectChangedError:
                return None
            return f"match {number}".encode()

        with ThreadPoolExecutor(WRITERS) as pool:
            winners = [won for won in pool.map(replace, range(WRITERS)) if won is not None]
        assert winners == [store.get("raced")]

    def test_list_is_by_folder_and_sorted(self, store: Store) -> None:
        paths = ["a/b", "a-b", "a.b", "ab/c", "a/b.c", "a/b-c/d", "a/B", "a/10", "a/9", "z"]
        for path in paths:
            store.put(path, path.encode())
        assert [item.path for item in store.list("")] == sorted(paths)
        assert [item.path for item in store.list("a")] == sorted(path for path in paths if path.startswith("a/"))
        assert [item.path for item in store.list("a/")] == [item.path for item in store.list("a")]
        assert [item.path for item in store.list("a/b-c")] == ["a/b-c/d"]
        assert list(store.list("a/b.c")) == []
        assert list(store.list("nothing/here")) == []
        assert all(item.size == len(item.path) for item in store.list(""))

    def test_delete(self, store: Store) -> None:
        store.put("a/b", b"1")
        store.delete("a/b")
        store.delete("a/b")
        store.delete("never/was")
        assert store.head("a/b") is None
        assert list(store.list("")) == []

    @pytest.mark.parametrize("path", ["", "/a", "a/", "../a", "a/../b", "./a", "a//b", "a\\b", ".draftsmith/lock"])
    def test_paths_stay_inside(self, store: Store, path: str) -> None:
        for use in (store.get, store.head, store.delete, lambda place: store.put(place, b"")):
            with pytest.raises(StoreError, match="not a path of an object"):
                use(path)

    def test_check_store(self, store: Store) -> None:
        check_store(store)
        assert list(store.list("")) == []

    def test_copy_to_a_folder_and_back(self, store: Store, tmp_path: Path) -> None:
        """Everything of the prefix is copied, commit records too and claims not; a second copy moves nothing."""
        contents = {
            "cache/x-1/a/c.0": b"one",
            "cache/x-1/zarr.json": b"{}",
            "records/cache/x-1/commits/0.json": b"done",
        }
        for path, data in contents.items():
            store.put(path, data)
        store.put("records/cache/x-1/claims/0.json", b"mine")
        store.put("cache/x-12/other", b"another prefix")
        folder = open_store(str(tmp_path / "copy"))
        report = copy_prefix(store, folder, prefix="cache/x-1")
        assert (report.num_copied, report.num_present, report.num_bytes) == (2, 0, 5)
        assert {item.path: folder.get(item.path) for item in folder.list("")} == contents
        store.put("records/cache/x-1/commits/0.json", b"done by another host")
        report = copy_prefix(folder, store, prefix="cache/x-1/")
        assert (report.num_copied, report.num_present, report.num_bytes) == (0, 2, 0)

    def test_copy_refuses_other_bytes(self, store: Store, tmp_path: Path) -> None:
        folder = open_store(str(tmp_path / "copy"))
        store.put("cache/x-1/a", b"one")
        folder.put("cache/x-1/a", b"two")
        for source, destination in ((store, folder), (folder, store)):
            with pytest.raises(ObjectExistsError, match="cache/x-1/a differs"):
                copy_prefix(source, destination, prefix="cache/x-1")
        with pytest.raises(ObjectMissingError, match="cache/x-2"):
            copy_prefix(store, folder, prefix="cache/x-2")


class TestLocalStore(StoreContract):
    @pytest.fixture
    def store_uri(self, tmp_path: Path) -> str:
        return str(tmp_path / "store")

    def test_a_folder_keeps_no_versions(self, store: Store) -> None:
        """An id can only be a mistake, so nothing is deleted."""
        assert store.put("a", b"one").version_id is None
        for path in ("a", "b"):
            with pytest.raises(StoreError, match=f"version of {path} in store .*: got version id 17, expected none"):
                store.delete(path, version_id="17")
        assert store.get("a") == b"one"


class BucketContract(StoreContract):
    """What a store in a bucket must do besides."""

    @pytest.fixture
    def store_uri(self, s3_env: S3Bucket) -> str:
        return s3_env.uri

    def test_delete_by_version(self, store: Store, s3_env: S3Bucket) -> None:
        """A version is gone for good, whether it is the newest or not; without an id only a mark is put on top."""
        client = s3_env.server.client()
        client.put_bucket_versioning(Bucket=s3_env.bucket, VersioningConfiguration={"Status": "Enabled"})

        def versions() -> list[str]:
            listed = client.list_object_versions(Bucket=s3_env.bucket)
            assert "DeleteMarkers" not in listed
            return sorted(item["VersionId"] for item in listed.get("Versions", []))

        ids = [store.put("a", data).version_id for data in (b"one", b"two", b"three")]
        assert None not in ids
        assert versions() == sorted(str(version_id) for version_id in ids)
        store.delete("a", version_id=ids[0])
        assert versions() == sorted(str(version_id) for version_id in ids[1:])
        assert store.get("a") == b"three"
        store.delete("a", version_id=ids[2])
        assert store.get("a") == b"two"
        store.delete("a", version_id=ids[2])
        assert versions() == [ids[1]]
        store.delete("a", version_id=ids[1])
        assert versions() == []
        assert store.head("a") is None
        last = store.put("a", b"four").version_id
        store.delete("a")
        listed = client.list_object_versions(Bucket=s3_env.bucket)
        assert [item["VersionId"] for item in listed["Versions"]] == [last]
        assert store.head("a") is None


@pytest.mark.s3
class TestDiskCacheOfS3(BucketContract):
    """Also what is read a second time, and through a folder that another process uses too."""

    @pytest.fixture
    def store(self, store_uri: str, tmp_path: Path) -> Store:
        return DiskCache(open_store(store_uri), folder=tmp_path / "disk", max_bytes=10_000_000)

    @pytest.fixture
    def second(self, store_uri: str, tmp_path: Path) -> Store:
        return DiskCache(open_store(store_uri), folder=tmp_path / "disk", max_bytes=10_000_000)


@pytest.mark.s3
class TestS3Store(BucketContract):
    def test_store_at_the_top_of_a_bucket(self, s3_env: S3Bucket) -> None:
        top = open_store(f"s3://{s3_env.bucket}")
        open_store(s3_env.uri).put("a/b", b"1")
        assert [item.path for item in top.list("")] == ["store/a/b"]
        assert top.get("store/a/b") == b"1"

    def test_sha256_is_in_the_metadata(self, store: Store, s3_env: S3Bucket) -> None:
        store.put_if_absent("a", b"one")
        seen = s3_env.server.client().head_object(Bucket=s3_env.bucket, Key="store/a")
        assert seen["Metadata"]["sha256"] == hashlib.sha256(b"one").hexdigest()

    def test_foreign_object_has_no_sha256(self, store: Store, s3_env: S3Bucket) -> None:
        s3_env.server.client().put_object(Bucket=s3_env.bucket, Key="store/a", Body=b"one")
        there = store.head("a")
        assert there is not None
        assert there.sha256 is None

    def test_version_ids(self, store: Store, s3_env: S3Bucket) -> None:
        s3_env.server.client().put_bucket_versioning(
            Bucket=s3_env.bucket, VersioningConfiguration={"Status": "Enabled"}
        )
        first, second = store.put("a", b"one"), store.put("a", b"two")
        assert None is not first.version_id != second.version_id is not None

    def test_more_than_one_page(self, store: Store) -> None:
        paths = [f"many/{number}" for number in range(1003)]
        with ThreadPoolExecutor(WRITERS) as pool:
            list(pool.map(lambda path: store.put(path, b""), paths))
        assert [item.path for item in store.list("many")] == sorted(paths)


def refusals(store: Store) -> list[StoreError]:
    """What each operation says of a store that cannot be used."""
    caught = []
    for use in (
        lambda: store.get("a"),
        lambda: store.head("a"),
        lambda: store.put("a", b""),
        lambda: store.put_if_absent("b", b""),
        lambda: store.put_if_match("a", b"", etag="0"),
        lambda: store.delete("a"),
        lambda: list(store.list("")),
    ):
        with pytest.raises(StoreError) as info:
            use()
        assert type(info.value) is StoreError
        assert "\n" not in str(info.value)
        assert info.value.__suppress_context__
        caught.append(info.value)
    return caught


@pytest.mark.s3
class TestS3Refusals:
    """Each says in one line what is wrong and which variable mends it; no error of botocore comes through."""

    @pytest.mark.parametrize("name", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
    def test_wrong_credentials(self, s3_env: S3Bucket, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        monkeypatch.setenv(name, "wrong")
        for error in refusals(open_store(s3_env.uri)):
            assert "valid credentials" in str(error)
            assert name in str(error)
            assert "wrong" not in str(error)
            assert s3_env.server.secret_key not in str(error)

    def test_no_credentials(self, s3_env: S3Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        for error in refusals(open_store(s3_env.uri)):
            assert "no credentials" in str(error)
            assert "AWS_ACCESS_KEY_ID" in str(error)

    def test_missing_bucket_is_not_made(self, s3_env: S3Bucket) -> None:
        store = open_store("s3://no-such-bucket/store")
        for use in (
            lambda: store.put("a", b""),
            lambda: store.get("a"),
            lambda: store.head("a"),
            lambda: list(store.list("")),
        ):
            with pytest.raises(StoreError, match=r"no bucket no-such-bucket.*DRAFTSMITH_STORE"):
                use()
        assert "no-such-bucket" not in [item["Name"] for item in s3_env.server.client().list_buckets()["Buckets"]]

    def test_nobody_at_the_endpoint(self, s3_env: S3Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
        started = time.monotonic()
        with pytest.raises(StoreError, match=r"cannot reach store .* at http://127\.0\.0\.1:9.*AWS_ENDPOINT_URL_S3"):
            open_store(s3_env.uri).get("a")
        # An address where nobody has ever answered is not waited for as long as a server that has gone.
        assert 4 < time.monotonic() - started < 30

    def test_endpoint_that_is_no_address(self, s3_env: S3Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "nonsense")
        with pytest.raises(StoreError, match=r"nonsense.*AWS_ENDPOINT_URL_S3"):
            open_store(s3_env.uri)
