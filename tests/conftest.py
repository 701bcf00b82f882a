"""Fixtures of the whole test suite, and how it is shared out between processes."""

import pytest
import torch

from tests.s3 import s3_env, s3_server

__all__ = ["s3_env", "s3_server"]

# Built once a test process and slow to build; tests that use one all go to the same process.
SHARED_LINES = {"prepared_line", "built_line", "trained_line"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none; under `pytest -n 2 --dist loadgroup` keep the tests of the whole line
    in one process, the others go where there is room."""
    has_gpu = torch.cuda.is_available()
    for item in items:
        if item.get_closest_marker("gpu") is not None and not has_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if SHARED_LINES & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.xdist_group("line"))
