"""Records of which working copies use a prefix."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from draftsmith.cache import references
from draftsmith.cache.references import read_references, register, this_machine
from draftsmith.errors import CacheError
from draftsmith.storage import LocalStore

PREFIX = "cache/toy-00000001"


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


def test_a_working_copy_has_one_record_a_prefix(store: LocalStore, tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "copy")
    register(store, PREFIX, root=tmp_path / "copy")
    register(store, PREFIX, root=tmp_path / "link")
    register(store, "cache/toy-00000002", root=tmp_path / "copy")
    (found,) = read_references(store, PREFIX)
    assert (found.root, found.host, found.is_here, found.is_mounted) == (
        tmp_path / "copy", socket.gethostname(), True, True,
    )  # fmt: skip
    assert found.path.startswith(f"records/{PREFIX}/references/")
    assert os.path.ismount(found.mount)
    assert found.root.is_relative_to(found.mount)
    register(store, PREFIX, root=tmp_path)
    assert sorted(item.root for item in read_references(store, PREFIX)) == [tmp_path, tmp_path / "copy"]


def test_registering_again_makes_the_record_younger(store: LocalStore, tmp_path: Path) -> None:
    register(store, PREFIX, root=tmp_path)
    (before,) = read_references(store, PREFIX)
    os.utime(Path(store.uri) / before.path, (1000, 1000))
    (old,) = read_references(store, PREFIX)
    assert old.modified_s == 1000
    register(store, PREFIX, root=tmp_path)
    (again,) = read_references(store, PREFIX)
    assert again.path == before.path
    assert again.modified_s >= before.modified_s


@pytest.mark.parametrize("text", ["{", "[]", '{"host": "a"}'])
def test_a_broken_record_is_told(store: LocalStore, text: str) -> None:
    store.put(f"records/{PREFIX}/references/a.json", text.encode())
    with pytest.raises(CacheError, match=f"broken reference record: .*delete {store.uri}/records/{PREFIX}"):
        list(read_references(store, PREFIX))


def test_a_machine_keeps_its_name_over_restarts_and_a_container_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """What names a container is that of its process namespace, which is new each time."""
    identity = Path("/etc/machine-id")
    if not identity.is_file() or not Path("/proc/self/ns/pid").is_symlink():
        pytest.skip("needs Linux with a machine-id")
    namespace = os.readlink("/proc/self/ns/pid")
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    monkeypatch.setattr(references, "FIRST_NAMESPACE", namespace)
    assert this_machine() == f"{socket.gethostname()} {identity.read_text().strip()}"
    monkeypatch.setattr(references, "FIRST_NAMESPACE", "pid:[1]")
    assert this_machine() == f"{socket.gethostname()} {boot} {namespace}"


def test_a_record_of_another_machine_is_not_of_here(store: LocalStore, tmp_path: Path) -> None:
    register(store, PREFIX, root=tmp_path)
    (own,) = read_references(store, PREFIX)
    body = json.loads(store.get(own.path))
    store.put(own.path, json.dumps(body | {"machine": "another", "mount": str(tmp_path)}).encode())
    (found,) = read_references(store, PREFIX)
    assert not found.is_here
    assert not found.is_mounted
