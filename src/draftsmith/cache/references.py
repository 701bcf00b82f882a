"""References: which working copies use a prefix. Small records in the store, beside the claims and commit records.

A commit or a manifest lies in one clone, the store is shared by many: what another clone uses cannot be seen from here
unless it has said so. A working copy that uses a prefix registers; `draftsmith cache gc` believes a record of another
machine, and looks itself where a record names a place on this one.
"""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from draftsmith.cache.claims import Owner
from draftsmith.errors import CacheError, ObjectMissingError
from draftsmith.manifest import hash8
from draftsmith.storage import Store, records_prefix

# The process namespace that Linux starts in; a container has one of its own.
FIRST_NAMESPACE = "pid:[4026531836]"


@dataclass(frozen=True)
class Reference:
    """A working copy that uses a prefix. `path` is the record's own, `modified_s` its time of writing, in Unix time.

    `machine` tells machines of one name apart; `mount` is the mount point that `root`, the working copy, lies under.
    """

    path: str
    host: str
    machine: str
    root: Path
    mount: Path
    modified_s: float

    @property
    def is_here(self) -> bool:
        """True if the working copy lay on this machine, so that this machine can say what has become of it."""
        return self.machine == this_machine()

    @property
    def is_mounted(self) -> bool:
        """False while the disk that the working copy lay on is not there; then nothing can be said about the copy."""
        return os.path.ismount(self.mount)


def register(store: Store, prefix: str, *, root: Path) -> None:
    """Record that the working copy at `root` uses `prefix`; once more makes the record younger.

    To be called before a job counts on what lies under the prefix, and when its manifest is written: a young record
    alone keeps a prefix.
    """
    root = root.resolve()
    body = {
        "host": socket.gethostname(),
        "machine": this_machine(),
        "root": str(root),
        "mount": str(_mount_point(root)),
        "registered_s": time.time(),
    }
    name = hash8([body["machine"], body["root"]])
    store.put(f"{references_prefix(prefix)}/{name}.json", json.dumps(body, indent=1, sort_keys=True).encode())


def references_prefix(prefix: str) -> str:
    """Where the references to `prefix` lie."""
    return f"{records_prefix(prefix)}/references"


def read_references(store: Store, prefix: str) -> Iterator[Reference]:
    """All references to `prefix`. Raises CacheError for a record that cannot be read: whoever wrote it is not known."""
    for item in store.list(references_prefix(prefix)):
        try:
            body = json.loads(store.get(item.path))
            host, machine, root, mount = (str(body[name]) for name in ("host", "machine", "root", "mount"))
        except ObjectMissingError:
            continue
        except (ValueError, KeyError, TypeError) as error:
            raise CacheError(f"broken reference record: {error!r}", where=f"delete {store.uri}/{item.path}") from None
        yield Reference(item.path, host, machine, Path(root), Path(mount), item.modified_s)


def this_machine() -> str:
    """What stays the same on this machine over restarts, and is the same on no other.

    In a container that is only as long as the container lives: images share what would name a machine, and the next
    container of the same name may have another disk.
    """
    identity = Path("/etc/machine-id")
    namespace = Path("/proc/self/ns/pid")
    if namespace.is_symlink():
        if os.readlink(namespace) == FIRST_NAMESPACE and identity.is_file() and identity.read_text().strip():
            return f"{socket.gethostname()} {identity.read_text().strip()}"
        return f"{socket.gethostname()} {Owner.this_process(processor='').machine}"
    return f"{socket.gethostname()} {uuid.getnode():012x}"


def _mount_point(folder: Path) -> Path:
    return next(place for place in (folder, *folder.parents) if os.path.ismount(place))
