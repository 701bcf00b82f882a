"""Real git repositories that look like working copies of draftsmith: params.yaml, manifests, dvc.lock, DVC's cache.

dvc.lock and the cache are written in DVC's own form without running it; `test_history` holds them against the real one.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import time
from pathlib import Path

import yaml

from draftsmith.manifest import Manifest, ObjectRecord
from draftsmith.paths import Workspace
from draftsmith.storage import Store

DAY_S = 86400.0
OBJECTS = {"zarr.json": b"{}", "context/c/0/0/0": b"c" * 700, "input_ids/c/0": b"i" * 41}


class Clone:
    """A working copy in `folder`, made by `git init`, or by cloning or adding a worktree elsewhere."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def make(cls, folder: Path) -> Clone:
        folder.mkdir(parents=True)
        clone = cls(folder)
        clone.git("init", "-q", "-b", "main")
        (folder / "params.yaml").write_text("{}\n")
        (folder / ".gitignore").write_text("/data/\n")
        (folder / ".dvc").mkdir()
        (folder / ".dvc" / "config").write_text("[core]\n    analytics = false\n")
        (folder / ".dvc" / ".gitignore").write_text("/cache\n/tmp\n/config.local\n")
        clone.commit("start")
        return clone

    @property
    def workspace(self) -> Workspace:
        return Workspace(self.folder)

    def git(self, *arguments: str) -> str:
        """Output of git. The user's own configuration is left out, the author is always the same."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        environment |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
        identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
        done = subprocess.run(
            ["git", *identity, *arguments], cwd=self.folder, env=environment, check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    def commit(self, message: str) -> str:
        """Commit everything; returns the id."""
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", message)
        return self.git("rev-parse", "HEAD")

    def write_manifest(self, prefix: str, *, target: str = "toy") -> Path:
        """The manifest data/cache/TARGET.json, not committed."""
        records = tuple(
            ObjectRecord(path, len(data), hashlib.sha256(data).hexdigest()) for path, data in OBJECTS.items()
        )
        path = self.workspace.cache_manifest(target)
        Manifest("cache", prefix, records, {"target": target}).write(path)
        return path

    def pin(self, *targets: str) -> None:
        """dvc.lock after the manifests of `targets` as they are, and their copies in DVC's cache."""
        stages = {"prompts": {"cmd": "true", "outs": [{"path": "data/prompts.json", "hash": "md5", "md5": "0" * 32}]}}
        for target in targets:
            data = self.workspace.cache_manifest(target).read_bytes()
            md5 = hashlib.md5(data).hexdigest()
            place = self.cached(md5)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(data)
            out = {"path": f"data/cache/{target}.json", "hash": "md5", "md5": md5, "size": len(data)}
            stages[f"cache@{target}"] = {"cmd": "true", "outs": [out]}
        (self.folder / "dvc.lock").write_text(yaml.safe_dump({"schema": "2.0", "stages": stages}, sort_keys=False))

    def cached(self, md5: str) -> Path:
        return self.folder / ".dvc" / "cache" / "files" / "md5" / md5[:2] / md5[2:]

    def commit_cache(self, prefix: str, *, target: str = "toy") -> str:
        """A commit that names `prefix`, as `dvc repro` and `git commit` leave it."""
        self.write_manifest(prefix, target=target)
        self.pin(target)
        return self.commit(f"cache {prefix}")

    def forget(self) -> None:
        """No manifest, no dvc.lock and no index entry any more; what is committed stays so."""
        shutil.rmtree(self.folder / "data", ignore_errors=True)
        (self.folder / "dvc.lock").unlink(missing_ok=True)
        self.git("add", "-A")

    def clone_to(self, folder: Path) -> Clone:
        self.git("clone", "-q", str(self.folder), str(folder))
        return Clone(folder)


def fill_prefix(store: Store, prefix: str) -> tuple[int, int]:
    """Some objects and a commit record; returns the number of the objects and their bytes."""
    for path, data in OBJECTS.items():
        store.put(f"{prefix}/{path}", data)
    store.put(f"records/{prefix}/commits/000000.json", b'{"objects": []}')
    return 3, 2 + 700 + 41


def make_old(folder: Path, *, days: float = 30.0) -> None:
    """Every file of a folder store as if it were written so long ago."""
    then = time.time() - days * DAY_S
    for path in folder.rglob("*"):
        os.utime(path, (then, then))
