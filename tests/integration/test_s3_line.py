"""The line on a real S3 server: the same commands, with only DRAFTSMITH_STORE and AWS's own variables set."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from draftsmith.storage import open_store
from tests.line_fixtures import DSPARK, TARGET, Line, prepared_line, tiny_target
from tests.s3 import S3Bucket

__all__ = ["prepared_line", "tiny_target"]

pytestmark = pytest.mark.s3


def on_s3(line: Line, bucket: S3Bucket, **settings: str) -> Line:
    return line.with_settings(DRAFTSMITH_STORE=bucket.uri, **(bucket.environment | settings))


def emptied(line: Line) -> Line:
    """The working copy as if nothing had been built in it."""
    shutil.rmtree(line.root / "data")
    (line.root / "dvc.lock").unlink(missing_ok=True)
    return line


def test_the_line_runs_on_s3(prepared_line: Line, s3_env: S3Bucket, tmp_path: Path) -> None:
    line = on_s3(emptied(prepared_line.copied(tmp_path / "line")), s3_env)
    line.run("prompts")
    line.run("answers", "--target", TARGET)
    line.run("cache", "build", "--target", TARGET)
    for kind in ("prompts", "answers", "cache"):
        # Prefix, digest, every object: the manifests name no store, so they are equal where the bytes are.
        assert line.manifest(kind) == prepared_line.manifest(kind)
    verified = line.run("cache", "verify", "--target", TARGET)
    assert "all as the manifest says" in verified.stdout
    line.run("train", "--key", DSPARK)
    assert line.report(DSPARK, "train")["steps"] == 10
    assert not line.store.exists(), "nothing may go to the local store"
    assert f"store {s3_env.uri} holds everything" in line.run("store", "check").stdout

    # Seen past our own code: objects lie below the prefix of the address, checkpoints with their marker.
    listing = s3_env.server.client().list_objects_v2(Bucket=s3_env.bucket)["Contents"]
    keys = {item["Key"] for item in listing}
    assert {key.split("/")[0] for key in keys} == {"store"}
    assert {key.split("/")[1] for key in keys} == {"prompts", "answers", "cache", "records", "train"}
    markers = {key.split("/")[3] for key in keys if key.endswith("/_complete.json")}
    assert markers == {"step-000004", "step-000006", "step-000008", "step-000010"}


def test_wrong_keys_are_told_in_one_line(prepared_line: Line, s3_env: S3Bucket, tmp_path: Path) -> None:
    line = emptied(prepared_line.copied(tmp_path / "line"))
    done = on_s3(line, s3_env, AWS_SECRET_ACCESS_KEY="wrong").tried("prompts")
    assert done.returncode == 2
    (message,) = done.stderr.strip().splitlines()
    for part in ("draftsmith: error: cannot", s3_env.uri, "SignatureDoesNotMatch", "AWS_SECRET_ACCESS_KEY"):
        assert part in message
    assert not line.workspace.prompts_manifest.exists()
    assert not line.workspace.receipt("prompts", "prompts").exists()
    assert [status for _, _, status in line.tracked_runs("prompts")] == ["FINISHED", "FAILED"]
    assert list(open_store(s3_env.uri).list("")) == []


def test_a_store_moves_to_s3_by_copy(prepared_line: Line, s3_env: S3Bucket, tmp_path: Path) -> None:
    """The working copy goes on from the other store: nothing is made again, and a build finds every shard done."""
    line = on_s3(prepared_line.copied(tmp_path / "line"), s3_env)
    told = line.tried("store", "check")
    assert told.returncode == 1
    assert f"cache@{TARGET}: store {s3_env.uri} lacks {line.manifest('cache').prefix}" in told.stdout
    copied = line.run("store", "copy", str(line.store), s3_env.uri).stdout
    shutil.rmtree(line.store)
    assert f"store {s3_env.uri} holds everything" in line.run("store", "check").stdout
    root = prepared_line.store
    local = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}
    # A reference belongs to the store that a working copy uses; the other one gets its own with the next build.
    local = {path for path in local if not path.startswith(".draftsmith/") and "/references/" not in path}
    assert {item.path for item in open_store(s3_env.uri).list("")} == local
    counted = sum(not path.startswith("records/") for path in local)  # commit records go with their objects
    assert f"{counted} objects copied" in copied
    before = line.manifest("cache")
    line.workspace.cache_manifest(TARGET).unlink()
    line.run("cache", "build", "--target", TARGET)
    assert line.manifest("cache") == before
    again = line.run("store", "copy", str(prepared_line.store), s3_env.uri).stdout
    assert f"{counted} were there already" in again
