"""MLflow's database as a file, seen past MLflow: opened by one process at a time, and moved with its working copy."""

from __future__ import annotations

import contextlib
import fcntl
import sqlite3
from collections.abc import Iterator
from pathlib import Path

BUSY_TIMEOUT_S = 5.0


@contextlib.contextmanager
def alone_at(uri: str) -> Iterator[None]:
    """Of the processes that open a database file at once one makes its tables, which MLflow does not see to itself."""
    if uri.startswith("sqlite:///"):
        file = uri.removeprefix("sqlite:///").partition("?")[0]
        with open(f"{file}.lock", "a") as lock, contextlib.closing(sqlite3.connect(file)) as database:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # MLflow would try a file that cannot be opened again and again for minutes.
            database.execute("SELECT count(*) FROM sqlite_master")
            yield
    else:
        yield


def follow_moved_copy(database: Path, root_uri: str) -> None:
    """Point the experiments in the database of a working copy that was moved or copied to its own artifacts.

    MLflow fixes an absolute place when an experiment is made; without this a copy would write into the original.
    """
    with contextlib.closing(sqlite3.connect(database, timeout=BUSY_TIMEOUT_S)) as connection, connection:
        rows = connection.execute("SELECT artifact_location FROM experiments WHERE name LIKE 'draftsmith/%'").fetchall()
        olds = {location.rpartition("/")[0] for (location,) in rows} - {root_uri}
        for old in olds:
            for table, column in (("experiments", "artifact_location"), ("runs", "artifact_uri")):
                connection.execute(
                    f"UPDATE {table} SET {column} = ? || substr({column}, ?) WHERE substr({column}, 1, ?) = ?",
                    (root_uri, len(old) + 1, len(old) + 1, f"{old}/"),
                )
