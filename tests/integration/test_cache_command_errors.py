"""Wrong use of plan, show, verify and gc, through the command line: one message, status 2, nothing changed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.integration.test_bad_input import refused
from tests.line_fixtures import TARGET, Line, files_below, line, prepared_line, tiny_target
from tests.s3 import S3Bucket

__all__ = ["line", "prepared_line", "tiny_target"]

AT = ("--target", TARGET)
GC = ("cache", "gc")


@pytest.mark.parametrize("age", ["x", "7", "-1d", ""])
def test_an_age_that_is_none(line: Line, age: str) -> None:
    message = "expected a number with s, m, h, d or w, such as 90m, 12h or 7d"
    assert refused(line, *GC, "--older-than", age) == f"--older-than cannot be read: got {age!r}, {message}"


def test_gc_without_an_answer_deletes_nothing(line: Line) -> None:
    """No terminal to ask, no --yes: what would be deleted is shown, and stays."""
    shutil.copytree(line.store / line.manifest("cache").prefix, line.store / "cache" / "old-0000dead")
    before = files_below(line.store, "*")
    done = line.tried(*GC, "--older-than", "0d")
    assert done.returncode == 130
    assert "delete  cache/old-0000dead: " in done.stdout
    assert f"keep    {line.manifest('cache').prefix}: " in done.stdout
    assert "this working copy" in done.stdout
    assert files_below(line.store, "*") == before
    done = line.run(*GC, "--older-than", "0d", "--yes")
    assert "deleted 1 of 1: " in done.stdout
    assert files_below(line.store / line.manifest("cache").prefix, "*") == {
        name.removeprefix(f"{line.manifest('cache').prefix}/"): age
        for name, age in before.items()
        if name.startswith(f"{line.manifest('cache').prefix}/")
    }
    assert not [name for name in files_below(line.store, "*") if "0000dead" in name]


def test_gc_outside_of_a_repository(line: Line) -> None:
    shutil.rmtree(line.root / ".git")
    message = refused(line, *GC)
    assert message.startswith("caches that no commit names cannot be told here: got ")
    assert "expected a clone of the repository, not an exported tree" in message


def test_gc_without_git(line: Line, tmp_path: Path) -> None:
    """The PATH holds nothing but this environment's programs."""
    message = refused(line.with_settings(PATH=str(tmp_path)), *GC)
    assert message == "no program git: expected git on the PATH, to see what commits name"


def test_gc_while_a_commits_manifest_is_missing(line: Line) -> None:
    line.git("add", "-A")
    line.git("commit", "-q", "-m", "built")
    assert "nothing to delete" in line.run(*GC).stdout
    line.workspace.cache_manifest(TARGET).unlink()
    shutil.rmtree(line.root / ".dvc" / "cache")
    message = refused(line, *GC, "--yes")
    assert f"names a cache through data/cache/{TARGET}.json, and that manifest is not here" in message
    assert "`dvc fetch --all-commits`" in message


def test_gc_of_a_store_that_cannot_be_read(line: Line) -> None:
    place = line.root / "store-file"
    place.write_text("not a folder")
    message = refused(line.with_settings(DRAFTSMITH_STORE=str(place)), *GC)
    assert "got Not a directory, expected a folder (DRAFTSMITH_STORE)" in message


@pytest.mark.parametrize("command", [GC, ("cache", "verify", *AT), ("cache", "show", "x", *AT)], ids=" ".join)
def test_wrong_credentials(line: Line, s3_env: S3Bucket, command: tuple[str, ...]) -> None:
    settings = {**s3_env.environment, "AWS_SECRET_ACCESS_KEY": "wrong", "DRAFTSMITH_STORE": s3_env.uri}
    message = refused(line.with_settings(**settings), *command)
    assert s3_env.uri in message
    assert "credentials" in message
    assert "AWS_ACCESS_KEY_ID" in message


def test_an_unknown_sample(line: Line) -> None:
    num_samples = line.manifest("cache").facts["totals"]["num_samples"]
    message = refused(line, "cache", "show", "no-such-id", *AT)
    assert message.startswith(f"no sample 'no-such-id' in the cache: expected one of {num_samples}, such as ")


def test_show_before_the_cache_is_built(line: Line) -> None:
    path = line.workspace.cache_manifest(TARGET)
    path.unlink()
    message = f"no cache manifest at {path}: expected `dvc repro` to run the cache stage first"
    assert refused(line, "cache", "show", "x", *AT) == message


@pytest.mark.parametrize(("option", "value"), [("--mean-length", "100"), ("--label-share", "0.5")])
def test_plan_with_options_that_do_not_go_together(line: Line, option: str, value: str) -> None:
    message = "--mean-length and --label-share describe samples that are not there yet: expected --tokens N with them"
    assert refused(line, "plan", *AT, option, value) == message


def test_plan_without_answers(line: Line) -> None:
    line.workspace.answers_manifest(TARGET).unlink()
    assert str(line.workspace.answers_manifest(TARGET)) in refused(line, "plan", *AT)
    missing = line.root / "nowhere.json"
    assert str(missing) in refused(line, "plan", *AT, "--answers", str(missing))


@pytest.mark.parametrize(
    ("option", "value"),
    [("--mean-length", "1"), ("--label-share", "1.5"), ("--ratio", "0"), ("--price-per-tb-month", "-1")],
)
def test_plan_with_figures_out_of_range(line: Line, option: str, value: str) -> None:
    """The option parser's own message names the option and its range."""
    done = line.tried("plan", *AT, option, value)
    assert done.returncode == 2
    assert f"Invalid value for '{option}'" in done.stderr


def test_plan_with_a_number_of_tokens_that_is_none(line: Line) -> None:
    for text in ("0", "-5", "1.24 giga"):
        message = refused(line, "plan", *AT, "--tokens", text)
        assert message.startswith(f"--tokens cannot be read: got {text!r}, expected a whole number of 1 or more")


def test_a_target_that_is_none(line: Line) -> None:
    message = "no target 'small': expected one of tiny (params.yaml: targets)"
    for command in (("plan",), ("cache", "show", "x"), ("cache", "verify")):
        assert refused(line, *command, "--target", "small") == message
