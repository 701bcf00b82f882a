"""Fixtures of the whole test suite, and how it is shared out between processes."""

import pytest

from tests.s3 import s3_env, s3_server

__all__ = ["s3_env", "s3_server"]

# Built once a test process and slow to build; tests that use one all go to the same process.
SHARED_LINES = {"prepared_line", "built_line", "trained_line"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Under `pytest -n 2 --dist loadgroup`: tests of the whole line in one process, others where there is room."""
    for item in items:
        if SHARED_LINES & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.xdist_group("line"))
