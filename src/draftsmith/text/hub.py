"""What is read from the Hugging Face hub, with one clear error where there is no hub. The hub's own cache is used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from draftsmith.errors import DraftsmithError, PromptError

PROBE_TIMEOUT_S = 10.0


def hub_folder(
    hf_id: str,
    *,
    kind: Literal["model", "dataset"],
    revision: str | None,
    patterns: Sequence[str] | None,
    error_type: type[DraftsmithError],
    where: str,
) -> Path:
    """The local folder of a repository's files that match `patterns`, downloaded unless the hub's cache holds them.

    A short question comes first, so that a machine without a hub learns it in a second instead of after all retries;
    it then makes do with the cache. HF_HUB_OFFLINE and HF_TOKEN hold as everywhere.

    Raises `error_type` if neither hub nor cache has the repository.
    """
    import huggingface_hub
    from huggingface_hub import errors

    transport_error: Any = errors.HfHubHTTPError.__bases__[0]  # of the HTTP client that the hub's library uses
    unreachable: Exception | None = None
    try:
        try:
            huggingface_hub.HfApi().repo_info(hf_id, repo_type=kind, revision=revision, timeout=PROBE_TIMEOUT_S)
        except errors.HfHubHTTPError:
            raise
        except (OSError, transport_error) as error:
            unreachable = error
        return Path(
            huggingface_hub.snapshot_download(
                hf_id,
                repo_type=kind,
                revision=revision,
                allow_patterns=None if patterns is None else list(patterns),
                local_files_only=unreachable is not None,
            )
        )
    except (OSError, ValueError, transport_error) as error:
        reason = unreachable or error
        raise error_type(
            f"the {kind} {hf_id} cannot be had from the hub" + (", nor is it in its cache" if unreachable else ""),
            got=f"{type(reason).__name__}: {' '.join(str(reason).split())[:200]}",
            expected=f"a reachable hub with revision {revision or 'main'} (HF_TOKEN set if access is restricted)",
            where=where,
        ) from None


def in_hub_cache(hf_id: str, *, revision: str | None, data_file: str | None = None) -> bool:
    """Whether the hub's cache on this machine holds a data set, or one file of it. Nothing is asked of the hub."""
    import huggingface_hub

    try:
        folder = huggingface_hub.snapshot_download(
            hf_id,
            repo_type="dataset",
            revision=revision,
            allow_patterns=None if data_file is None else [data_file],
            local_files_only=True,
        )
    except (OSError, ValueError):
        return False
    return data_file is None or (Path(folder) / data_file).is_file()


def hub_rows(
    hf_id: str,
    *,
    split: str,
    revision: str | None,
    where: str,
    config: str | None = None,
    data_file: str | None = None,
    columns: Sequence[str] | None = None,
) -> Iterator[dict[str, Any]]:
    """The rows of one split of a data set, with all of its columns or with `columns` only.

    With `data_file` that one file of the repository is read, as Parquet if its name ends so, else as JSON lines.

    Raises PromptError if hub and cache have no such data set, file or revision, it cannot be read, or lacks a column.
    """
    import datasets

    folder = hub_folder(
        hf_id,
        kind="dataset",
        revision=revision,
        patterns=None if data_file is None else [data_file],
        error_type=PromptError,
        where=where,
    )
    try:
        if data_file is None:
            table = datasets.load_dataset(str(folder), config, split=split)
        else:
            reader = "parquet" if data_file.endswith(".parquet") else "json"
            table = datasets.load_dataset(reader, data_files={split: str(folder / data_file)}, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise PromptError(
            f"the dataset {hf_id} cannot be read", got=" ".join(str(error).split())[:200], where=where
        ) from None
    if columns is not None:
        if missing := [name for name in columns if name not in table.column_names]:
            raise PromptError(f"the dataset {hf_id} has no column {missing[0]}", got=table.column_names, where=where)
        table = table.select_columns(list(columns))
    yield from table
