"""The working copy of a study: its params, its files, what it shares, and who may use it. Real git, no training."""

from __future__ import annotations

import copy
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from draftsmith.errors import DraftsmithError, MachineError, ParamsError
from draftsmith.jobs import study as job
from draftsmith.jobs.history import dvc_cache
from draftsmith.jobs.study_copy import StudyCopy, study_copy, study_key, study_params, with_absolute_places
from draftsmith.params import Params, Study, load_params, parse_params
from draftsmith.paths import Workspace
from draftsmith.provenance import read_source
from draftsmith.termination import Terminated
from tests.unit.jobs.clones import Clone

REPOSITORY = Path(__file__).resolve().parents[3]
RAW: dict[str, Any] = yaml.safe_load((REPOSITORY / "params.yaml").read_text())


def made(**study: Any) -> dict[str, Any]:
    """params.yaml of the copy, for the repository's own params with another study."""
    raw = copy.deepcopy(RAW)
    raw["study"] = {"target": "smollm2_135m", "drafters": ["dspark_b7_2l", "dflash_b7_2l"], **study}
    params = parse_params(raw)
    assert params.study is not None
    before = copy.deepcopy(raw)
    body = study_params(raw, params, params.study)
    assert raw == before
    return body


def test_the_studys_runs_take_the_place_of_all_runs() -> None:
    body = made(train={"steps": 7}, evaluate={"temperatures": [0.5]})
    assert list(body["runs"]) == ["dspark_b7_2l-smollm2_135m-study", "dflash_b7_2l-smollm2_135m-study"]
    params = parse_params(body)
    assert params.study is None
    assert params.active_targets == ("smollm2_135m",)
    for key in params.runs:
        assert params.train_of(key).steps == 7
        assert params.train_of(key).lr == RAW["train"]["lr"]
    assert params.evaluate.temperatures == (0.5,)
    assert params.evaluate.max_new_tokens == RAW["evaluate"]["max_new_tokens"]


def test_every_tokens_state_is_kept_only_where_a_drafter_reads_it() -> None:
    assert made()["targets"] == RAW["targets"]
    targets = made(drafters=["dspark_b7_2l", "mtp1"])["targets"]
    assert targets.pop("smollm2_135m") == {**RAW["targets"]["smollm2_135m"], "last_hidden": "all"}
    assert targets == {name: row for name, row in RAW["targets"].items() if name != "smollm2_135m"}


def test_the_default_study_is_of_all_six_kinds_on_the_recipe_of_the_default_run() -> None:
    params = load_params(REPOSITORY / "params.yaml")
    study = params.study
    assert study is not None
    body = parse_params(study_params(RAW, params, study))
    kinds = [
        (row.kind, None if row.sequential is None else row.sequential.kind)
        for row in (params.drafters[name] for name in study.drafters)
    ]
    assert kinds == [
        ("dspark", "markov"), ("dspark", "gated"), ("dspark", "rnn"),
        ("dflash", None), ("eagle3", None), ("mtp1", None),
    ]  # fmt: skip
    assert {body.train_of(study_key(study, name)).model_dump_json() for name in study.drafters} == {
        params.train.model_dump_json()
    }
    assert body.targets["smollm2_135m"].last_hidden == "all"
    assert body.prompts == params.prompts
    assert body.answers == params.answers


def test_places_outside_of_the_copy_stay_where_they_are(tmp_path: Path) -> None:
    main, twin = Workspace(tmp_path / "main"), Workspace(tmp_path / "main" / "data" / "study" / "copy")
    (twin.root / "prompts").mkdir(parents=True)
    (twin.root / "prompts" / "mine.jsonl").write_text("")
    body = copy.deepcopy(RAW)
    body["targets"]["mine"] = {"folder": "../models/mine"}
    body["targets"]["theirs"] = {"folder": "/models/theirs"}
    files = ["prompts/mine.jsonl", "data/more.jsonl"]
    body["prompts"]["files"] = [{"path": path, "domain": "chat"} for path in files]
    found = with_absolute_places(body, workspace=main, copy=twin)
    assert found["targets"]["mine"]["folder"] == str(tmp_path / "models" / "mine")
    assert found["targets"]["theirs"] == body["targets"]["theirs"]
    assert found["targets"]["smollm2_135m"] == RAW["targets"]["smollm2_135m"]
    assert [row["path"] for row in found["prompts"]["files"]] == [files[0], str(main.root / files[1])]


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clone:
    """A working copy with sources, a report and a dvc.lock, all committed."""
    for name in [name for name in os.environ if name.startswith(("DRAFTSMITH_", "MLFLOW_", "GIT_"))]:
        monkeypatch.delenv(name)
    found = Clone.make(tmp_path / "main")
    shutil.copy(REPOSITORY / "params.yaml", found.folder)
    write(found, "src/draftsmith/a.py", "A = 1\n")
    write(found, "src/draftsmith/b.py", "B = 1\n")
    write(found, "reports/k/train.json", "{}\n")
    write(found, "dvc.lock", "schema: '2.0'\nstages: {}\n")
    write(found, ".gitignore", "/data/\n*.so\n__pycache__/\n")
    found.commit("sources")
    return found


def write(clone: Clone, name: str, text: str) -> None:
    path = clone.folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def params_of(clone: Clone) -> tuple[Params, Study]:
    params = load_params(clone.workspace.params)
    assert params.study is not None
    return params, params.study


def copied(clone: Clone) -> StudyCopy:
    """The study's copy, brought up to date and let go again."""
    with study_copy(clone.workspace, *params_of(clone)) as found:
        return found


def test_a_copy_has_the_sources_as_they_are_now(clone: Clone) -> None:
    write(clone, "src/draftsmith/a.py", "A = 2\n")  # changed, not committed
    write(clone, "src/draftsmith/new.py", "N = 1\n")  # not added
    write(clone, "src/draftsmith/_built.so", "machine code")  # ignored, but the sources use it
    write(clone, "prompts/mine.jsonl", "{}\n")
    write(clone, "models/mine/model.safetensors", "may be large")
    write(clone, "data/big.bin", "not copied")
    (clone.folder / "src" / "draftsmith" / "b.py").unlink()
    found = copied(clone)
    root = found.workspace.root
    assert root == clone.folder / "data" / "study" / "copy"
    files = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file() and ".git/" not in str(path)}
    assert files == {
        ".gitignore", ".dvc/config", ".dvc/.gitignore", ".dvc/config.local", "params.yaml",
        "prompts/mine.jsonl", "src/draftsmith/a.py", "src/draftsmith/new.py", "src/draftsmith/_built.so",
    }  # fmt: skip
    assert (root / "src" / "draftsmith" / "a.py").read_text() == "A = 2\n"
    assert next(iter(load_params(root / "params.yaml").runs)) == "dspark_b7_2l-smollm2_135m-study"
    # Git says of the copy what it says of the original, and that the params are the study's own.
    ours, theirs = read_source(root), read_source(clone.folder)
    assert ours.commit == theirs.commit == clone.git("rev-parse", "HEAD")
    changed = ("prompts/mine.jsonl", "src/draftsmith/a.py", "src/draftsmith/b.py", "src/draftsmith/new.py")
    assert theirs.changed == ("models/mine/model.safetensors", *changed)
    assert ours.changed == ("params.yaml", *changed)


def test_the_original_is_left_as_it_is(clone: Clone) -> None:
    before = {path: path.read_bytes() for path in clone.folder.rglob("*") if path.is_file()}
    copied(clone)
    below = clone.folder / "data"
    after = {
        path: path.read_bytes() for path in clone.folder.rglob("*") if path.is_file() and below not in path.parents
    }
    assert after == before
    assert clone.git("status", "--porcelain") == ""


def test_a_copy_follows_the_original_and_keeps_what_it_made(clone: Clone) -> None:
    root = copied(clone).workspace.root
    own = {"dvc.lock": "made by the study\n", "reports/k-study/train.json": "{}\n", "data/cache/t.json": "{}\n"}
    for name, text in own.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    kept = (root / "src" / "draftsmith" / "b.py").stat().st_mtime_ns, (root / "params.yaml").stat().st_mtime_ns
    (clone.folder / "src" / "draftsmith" / "a.py").unlink()
    write(clone, "src/draftsmith/c.py", "C = 1\n")
    commit = clone.commit("a is c now")
    assert copied(clone).workspace.root == root
    assert not (root / "src" / "draftsmith" / "a.py").exists()
    assert (root / "src" / "draftsmith" / "c.py").read_text() == "C = 1\n"
    assert {name: (root / name).read_text() for name in own} == own
    source = read_source(root)
    assert (source.commit, source.changed) == (commit, ("params.yaml",))
    assert kept == (
        (root / "src" / "draftsmith" / "b.py").stat().st_mtime_ns,
        (root / "params.yaml").stat().st_mtime_ns,
    )


def test_a_copy_shares_what_is_big(clone: Clone, monkeypatch: pytest.MonkeyPatch) -> None:
    found = copied(clone)
    root = found.workspace.root
    assert dvc_cache(root) == dvc_cache(clone.folder) == clone.folder / ".dvc" / "cache"
    (clone.folder / "data" / "targets" / "t").mkdir()
    assert found.workspace.target_dir("t").is_dir()
    assert found.environment["DRAFTSMITH_STORE"] == str(clone.folder / "data" / "store")
    assert found.environment["MLFLOW_TRACKING_URI"] == f"sqlite:///{clone.folder / 'mlflow.db'}"
    # Relative places are those of the folder that the command was given in.
    monkeypatch.chdir(clone.folder)
    monkeypatch.setenv("DRAFTSMITH_STORE", "elsewhere")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///other.db")
    found = copied(clone)
    assert found.environment["DRAFTSMITH_STORE"] == str(clone.folder / "elsewhere")
    assert found.environment["MLFLOW_TRACKING_URI"] == f"sqlite:///{clone.folder / 'other.db'}"
    monkeypatch.setenv("DRAFTSMITH_STORE", "s3://bucket/prefix")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    found = copied(clone)
    assert found.environment["DRAFTSMITH_STORE"] == "s3://bucket/prefix"
    assert found.environment["MLFLOW_TRACKING_URI"] == "http://127.0.0.1:5000"


def test_commands_run_the_copys_own_sources(clone: Clone, monkeypatch: pytest.MonkeyPatch) -> None:
    write(clone, "src/told.py", "import os, pathlib, sys\npathlib.Path('told').write_text(os.getcwd())\nsys.exit(3)\n")
    monkeypatch.setenv("GIT_DIR", "/nowhere")  # as in a git hook
    with study_copy(clone.workspace, *params_of(clone)) as found:
        assert found.run("told") == 3
        assert (found.workspace.root / "told").read_text() == str(found.workspace.root)
        with pytest.raises(DraftsmithError, match=r"`told` ended with status 3 in .*study/copy"):
            found.must_run("told")


SLEEPER = """\
import pathlib, signal, subprocess, sys, time
stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(300)"
child = subprocess.Popen([sys.executable, "-c", stubborn], stdout=subprocess.PIPE)
child.stdout.readline()
pathlib.Path("pid").write_text(str(child.pid))
time.sleep(300)
"""


@pytest.mark.parametrize("stop", [KeyboardInterrupt, Terminated])
def test_who_is_stopped_leaves_nothing_running(
    clone: Clone, monkeypatch: pytest.MonkeyPatch, stop: type[BaseException]
) -> None:
    """The command ends, and its child, which does not listen to SIGTERM, too."""
    write(clone, "src/sleeper.py", SLEEPER)
    monkeypatch.setattr("draftsmith.jobs.study_copy.STOP_GRACE_S", 1.0)

    def end(number: int, frame: object) -> None:
        raise stop(1)

    before = signal.signal(signal.SIGUSR1, end)
    try:
        with study_copy(clone.workspace, *params_of(clone)) as found:
            pid = found.workspace.root / "pid"

            def tell() -> None:
                while not (pid.is_file() and pid.read_text()):
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGUSR1)

            threading.Thread(target=tell).start()
            with pytest.raises(stop):
                found.run("sleeper")
            child = int(pid.read_text())
            gone = not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
            assert gone
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_one_study_at_a_time(clone: Clone) -> None:
    opened = params_of(clone)
    with (
        study_copy(clone.workspace, *opened),
        pytest.raises(MachineError, match="another study works in this working copy"),
        study_copy(clone.workspace, *opened),
    ):
        pass
    copied(clone)


def test_what_a_study_needs_is_named(clone: Clone, tmp_path: Path) -> None:
    exported = tmp_path / "exported"
    shutil.copytree(clone.folder, exported, ignore=shutil.ignore_patterns(".git"))
    with pytest.raises(MachineError, match=r"git rev-parse failed in .*exported.*not a git repository"):
        copied(Clone(exported))
    shutil.rmtree(clone.folder / ".dvc")
    with pytest.raises(MachineError, match="a study needs DVC"):
        copied(clone)


def test_params_without_a_study_are_refused(clone: Clone) -> None:
    raw = copy.deepcopy(RAW)
    del raw["study"]
    with pytest.raises(ParamsError, match=r"no study: expected a section `study` \(params.yaml: study\)"):
        job.run(clone.workspace, parse_params(raw), say=lambda _: None)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"drafters": ["mtp1"]}, "study.drafters: Tuple should have at least 2 items"),
        ({"drafters": ["mtp1", "mtp1"]}, "study.drafters must differ, got ['mtp1', 'mtp1']"),
        ({"drafters": ["mtp1", "x"]}, "study.drafters: no such row in drafters: 'x'"),
        ({"target": "x"}, "study.target: no such row in targets: 'x'"),
        ({"train": {"lr": -1, "foo": 2}}, "study.train.lr: Input should be greater than 0, got -1; unknown key "),
        ({"evaluate": {"batch_size": "x"}}, "study.evaluate.batch_size: Input should be a valid integer"),
        ({"baseline": "mtp1"}, "unknown key study.baseline"),
    ],
)
def test_a_wrong_study_is_told_by_its_place(change: dict[str, Any], told: str) -> None:
    raw = copy.deepcopy(RAW)
    raw["study"].update(change)
    with pytest.raises(ParamsError) as caught:
        parse_params(raw)
    assert told in str(caught.value)
