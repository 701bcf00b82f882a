"""What one git repository says about caches: its commits, its index and its working copies name prefixes of the store.

A commit names a prefix through the dvc.lock in it, which holds the md5 of a cache manifest; the manifest itself lies in
DVC's cache. Counted is every commit that git can still reach: from branches, remote branches, tags, stashes, DVC's
experiments, the heads of all worktrees, and from reflogs too, for that is where an amended or reset commit is found
again. Whatever cannot be read might name any prefix at all, so it raises.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import yaml
from dvc.config import Config
from dvc.exceptions import DvcException

from draftsmith.errors import CacheError, MachineError, StoreError
from draftsmith.provenance import GIT_OVERRIDES
from draftsmith.storage import check_prefix

# What would change how git reads a repository that is to be read as it is.
ENVIRONMENT = (*GIT_OVERRIDES, "GIT_LITERAL_PATHSPECS", "GIT_GLOB_PATHSPECS", "GIT_NOGLOB_PATHSPECS")
LOCK_FILES = ":(top,glob)**/dvc.lock"
MANIFESTS = "data/cache"
SHORT = 10


@dataclass(frozen=True)
class Pin:
    """An output of a dvc.lock: a cache manifest. `path` is as the lock names it, `md5` that of the manifest."""

    path: str
    md5: str


@dataclass(frozen=True)
class Lock:
    """A dvc.lock: `blob` is git's id of its bytes, `source` says where it stands; `commit` is "" outside of commits."""

    blob: str
    source: str
    commit: str


class History:
    """Reads what the repository around `root`, a working copy with params.yaml, names; `name` is what to call it.

    Keeps what it read of git's blobs and of manifests, for those never change: a second `read` takes a moment.
    """

    def __init__(self, root: Path, *, name: str = "this working copy") -> None:
        self._root, self._name = root.resolve(), name
        self._pins: dict[str, tuple[Pin, ...]] = {}
        self._prefixes: dict[str, str] = {}
        self._seen: set[str] = set()
        self._locks: dict[str, Lock] = {}

    @property
    def is_repository(self) -> bool:
        """False for a folder outside of any git repository, such as an exported tree."""
        return any((folder / ".git").exists() for folder in (self._root, *self._root.parents))

    def read(self) -> dict[str, list[str]]:
        """Prefix -> who names it, in words. Raises CacheError for what cannot be read, with what would mend it."""
        if not self.is_repository:
            raise CacheError(
                "caches that no commit names cannot be told here",
                got=f"{self._root}, which is in no git repository",
                expected="a clone of the repository, not an exported tree",
            )
        if self._git("rev-parse", "--is-shallow-repository").strip() == b"true":
            raise CacheError(
                f"{self._root} is a shallow clone: older commits may name caches, and are not here",
                expected="`git fetch --unshallow` first",
            )
        self._read_commits()
        copies = list(self._working_copies())
        locks = [*self._locks.values(), *(lock for copy in copies for lock in self._open_locks(copy))]
        self._read_pins([lock for lock in locks if lock.blob not in self._pins])
        named: dict[str, list[str]] = defaultdict(list)
        present: dict[str, str] = {}
        for copy in copies:
            for file, data in manifests(copy):
                present[_md5(data)] = manifest_prefix(data, where=str(file))
                named[present[_md5(data)]].append(f"{self._copy_name(copy)} ({MANIFESTS}/{file.name})")
        folders = list(dict.fromkeys(folder for copy in copies if (folder := dvc_cache(copy)) is not None))
        for lock in locks:
            for pin in self._pins[lock.blob]:
                if pin.md5 not in self._prefixes:
                    self._prefixes[pin.md5] = self._resolve(lock, pin, folders=folders, present=present)
                named[self._prefixes[pin.md5]].append(f"{lock.source} ({pin.path})")
        return named

    def read_manifests(self) -> dict[str, list[str]]:
        """As `read`, of the manifests in the working copy alone: for a folder without git."""
        named: dict[str, list[str]] = defaultdict(list)
        for file, data in manifests(self._root):
            named[manifest_prefix(data, where=str(file))].append(f"{self._name} ({MANIFESTS}/{file.name})")
        return named

    def _read_commits(self) -> None:
        """Note every dvc.lock that any commit brought in, wherever in the tree, as against each of its parents."""
        commits = self._git("rev-list", "--all", "--reflog").decode().split()
        fresh = [commit for commit in commits if commit not in self._seen]
        if not fresh:
            return
        raw = ("diff-tree", "--stdin", "-r", "-m", "--root", "--raw", "-z", "--no-renames", "--no-abbrev")
        changes = self._git(*raw, "--", LOCK_FILES, data="".join(f"{commit}\n" for commit in fresh).encode())
        commit, fields = "", iter(changes.decode(errors="surrogateescape").split("\0"))
        for field in fields:
            if not field.startswith(":"):
                commit = field.split(" ")[0].strip() or commit
                continue
            _, _, _, blob, status = field.split(" ")
            path = next(fields)
            if status != "D":
                where = "" if PurePosixPath(path).parent == PurePosixPath(".") else f", {path}"
                self._locks.setdefault(blob, Lock(blob, f"commit {commit[:SHORT]}{where}", commit))
        self._seen.update(fresh)

    def _working_copies(self) -> Iterator[Path]:
        """This working copy and the same folder of the repository's other worktrees.

        Raises CacheError for a worktree on a disk that is not there now.
        """
        below = self._git("rev-parse", "--show-prefix").decode().rstrip("\n")
        yield self._root
        for entry in self._git("worktree", "list", "--porcelain").decode(errors="surrogateescape").split("\n\n"):
            lines = entry.splitlines()
            if not lines or "bare" in lines:
                continue
            tree = Path(lines[0].removeprefix("worktree "))
            locked = any(line.split(" ")[0] == "locked" for line in lines)
            if not tree.is_dir() and locked:
                raise CacheError(
                    f"worktree {tree} is locked and not there, so it cannot be asked what it uses",
                    expected=f"its disk to be mounted, or `git worktree remove -f -f {tree}` if it is gone for good",
                )
            if tree.is_dir() and (tree / below).resolve() != self._root:
                yield (tree / below).resolve()

    def _open_locks(self, copy: Path) -> Iterator[Lock]:
        """What a working copy has not committed: dvc.lock in the index (all sides of a merge) and on disk."""
        for line in self._git("ls-files", "-s", "-z", "--", "dvc.lock", at=copy).decode().split("\0"):
            blob = line.split(" ")[1] if line else ""
            if blob and blob not in self._locks:
                yield Lock(blob, f"the index of {copy}", "")
        data = _read(copy / "dvc.lock")
        if data is not None:
            # Named as git would name its content, so that what a commit holds already is not told twice.
            blob = self._git("hash-object", "--stdin", "--no-filters", data=data).decode().strip()
            lock = Lock(blob, f"dvc.lock of {copy}, not committed", "")
            if blob not in self._pins:
                self._pins[blob] = parse_lock(data, where=f"{copy}, not committed,")
            if blob not in self._locks:
                yield lock

    def _read_pins(self, locks: list[Lock]) -> None:
        """Read the blobs of dvc.lock files, all in one go."""
        by_blob = {lock.blob: lock for lock in reversed(locks)}
        if not by_blob:
            return
        answer = self._git("cat-file", "--batch", data="".join(f"{blob}\n" for blob in by_blob).encode())
        at = 0
        for blob, lock in by_blob.items():
            head, at = answer[at : answer.index(b"\n", at)].decode(), answer.index(b"\n", at) + 1
            if not head.startswith(f"{blob} blob "):
                raise CacheError(
                    f"dvc.lock of {lock.source} cannot be read", got=head, expected="a whole clone: `git fetch`"
                )
            size = int(head.split(" ")[2])
            self._pins[blob] = parse_lock(answer[at : at + size], where=lock.source)
            at += size + 1

    def _resolve(self, lock: Lock, pin: Pin, *, folders: list[Path], present: dict[str, str]) -> str:
        """The prefix in a pinned manifest. DVC 3 keeps it under files/md5, DVC 2 kept it straight in the cache."""
        parts = Path(pin.md5[:2]) / pin.md5[2:]
        places = [folder / below / parts for folder in folders for below in ("files/md5", "")]
        if pin.md5 in present:
            return present[pin.md5]
        for place in places:
            data = _read(place)
            if data is None:
                continue
            if _md5(data) != pin.md5:
                raise CacheError(
                    f"{lock.source}: the manifest of {pin.path} has changed in DVC's cache",
                    got=place,
                    expected="to delete that file, then `dvc fetch --all-commits`",
                )
            return manifest_prefix(data, where=f"{pin.path} of {lock.source}, kept as {place}")
        raise CacheError(
            f"{lock.source} names a cache through {pin.path}, and that manifest is not here: nothing may be deleted",
            got=f"no {parts} in {' or '.join(str(folder) for folder in folders) or 'any DVC cache'}",
            expected=self._cure(lock),
        )

    def _cure(self, lock: Lock) -> str:
        if not lock.commit:
            return "`dvc fetch` or `dvc repro` in that working copy"
        if self._git("for-each-ref", "--contains", lock.commit, "--count=1").strip():
            return "`dvc fetch --all-commits`, after a `dvc push` where it was made"
        # DVC's own walk does not see what only a reflog remembers.
        forget = "`git reflog expire --expire-unreachable=now --all` to forget it"
        return f"`dvc fetch` from that commit or, as no branch or tag holds it, {forget}"

    def _copy_name(self, copy: Path) -> str:
        return self._name if copy == self._root else f"worktree {copy}"

    def _git(self, *arguments: str, data: bytes = b"", at: Path | None = None) -> bytes:
        """Output of git, read-only. Raises CacheError with git's own words if it fails."""
        environment = {name: value for name, value in os.environ.items() if name not in ENVIRONMENT}
        # Grafts and replacements hide commits that are there. A reader takes no lock from the user's own git.
        environment |= {
            "GIT_OPTIONAL_LOCKS": "0", "GIT_NO_REPLACE_OBJECTS": "1", "GIT_GRAFT_FILE": os.devnull, "LC_ALL": "C",
        }  # fmt: skip
        try:
            done = subprocess.run(
                ["git", "-C", str(at or self._root), *arguments], input=data, capture_output=True, env=environment
            )
        except FileNotFoundError:
            raise MachineError("no program git", expected="git on the PATH, to see what commits name") from None
        if done.returncode != 0:
            told = " ".join(done.stderr.decode(errors="replace").split())
            raise CacheError(
                f"git {arguments[0]} failed in {at or self._root}", got=told, expected="a repository in order"
            )
        return done.stdout


def parse_lock(data: bytes, *, where: str) -> tuple[Pin, ...]:
    """The cache manifests among the outputs of a dvc.lock. Raises CacheError if it is none, or gives one no md5."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        body = yaml.load(data, Loader=loader) or {}
        stages = body["stages"] if "schema" in body else body
        outs = [item for stage in stages.values() for item in stage.get("outs", [])]
        found = [item for item in outs if _is_manifest(item["path"])]
        pins = tuple(Pin(item["path"], str(item["md5"])) for item in found)
    except (yaml.YAMLError, UnicodeDecodeError, AttributeError, KeyError, TypeError) as error:
        told = " ".join(f"{type(error).__name__}: {error}".split())
        raise CacheError(f"dvc.lock of {where} cannot be read", got=told, expected="a lock file of DVC") from None
    broken = [pin for pin in pins if len(pin.md5) != 32 or not set(pin.md5) <= set("0123456789abcdef")]
    if broken:
        raise CacheError(f"dvc.lock of {where}: md5 of {broken[0].path}", got=broken[0].md5, expected="32 hex digits")
    return pins


def _is_manifest(path: str) -> bool:
    place = PurePosixPath(path)
    return place.suffix == ".json" and place.parent.parts[-2:] == tuple(MANIFESTS.split("/"))


def manifests(copy: Path) -> Iterator[tuple[Path, bytes]]:
    """The cache manifests of a working copy, committed or not. Raises CacheError for one that cannot be read."""
    for file in sorted((copy / MANIFESTS).glob("*.json")):
        data = _read(file)
        # DVC takes an output away before it runs its stage; until then dvc.lock names it.
        if data is not None:
            yield file, data


def manifest_prefix(data: bytes, *, where: str) -> str:
    """The prefix that a cache manifest of any version names. Raises CacheError if the file is none."""
    try:
        body = json.loads(data)
        if body["kind"] != "cache":
            raise ValueError(f"kind {body['kind']!r}")
        return check_prefix(body["prefix"])
    except (ValueError, KeyError, TypeError, AttributeError, StoreError) as error:
        told = " ".join(f"{type(error).__name__}: {error}".split())
        raise CacheError("not the manifest of a cache, so what it names is not known", got=told, where=where) from None


def dvc_cache(copy: Path) -> Path | None:
    """The folder of DVC's cache as the configuration of a working copy sets it; None where DVC was never set up."""
    for folder in (copy, *copy.parents):
        if (folder / ".dvc").is_dir():
            try:
                return Path(Config(str(folder / ".dvc"))["cache"].get("dir") or folder / ".dvc" / "cache")
            except DvcException as error:
                raise CacheError(f"DVC's configuration of {copy} cannot be read", got=error) from None
        if (folder / ".git").exists():
            return None
    return None


def _read(file: Path) -> bytes | None:
    """The file's bytes; None if it is not there. Raises CacheError if it is and cannot be read."""
    try:
        return file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CacheError(f"cannot read {file}", got=error.strerror, expected="a file that this user may read") from None


def _md5(data: bytes) -> str:
    """DVC's name for a file's content."""
    return hashlib.md5(data, usedforsecurity=False).hexdigest()
