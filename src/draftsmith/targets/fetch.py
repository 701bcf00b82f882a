"""Where a target's weights come from: a Python package, the hub, or a folder; it is always one folder in the end."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

from draftsmith.errors import TargetError
from draftsmith.manifest import write_json
from draftsmith.params import Target
from draftsmith.targets.families import FAMILIES
from draftsmith.text.chat import ChatFormat
from draftsmith.text.hub import hub_folder
from draftsmith.text.packages import DATA_COMMAND

MARKER = "draftsmith-source.json"
CONVERSION = 1  # raised whenever the conversion writes other bytes from the same source
HUB_PATTERNS = ("*.json", "*.safetensors", "*.jinja")


def fetch_target(name: str, row: Target, *, folder: Path) -> Path:
    """The Hugging Face folder (config, safetensors, tokenizer) of target `name`, made or downloaded if need be.

    A package's GGUF file is converted once into `folder`; a hub model stays in the hub's own cache; a `folder` row is
    used where it lies. Safe to call again and from several processes.

    Raises:
        TargetError: the package, hub or folder is missing, or the folder is incomplete.
    """
    place = f"params.yaml: targets.{name}"
    if row.package is not None:
        return _from_package(row, row.package, folder=folder, place=f"{place}.package")
    if row.hf_id is not None:
        downloaded = hub_folder(
            row.hf_id,
            kind="model",
            revision=row.revision,
            patterns=HUB_PATTERNS,
            error_type=TargetError,
            where=f"{place}.hf_id",
        )
        return check_folder(downloaded, place=f"{place}.hf_id")
    if row.folder is None:  # the schema allows exactly one of the three
        raise TargetError("a target without a source", where=place)
    return check_folder(Path(row.folder).expanduser(), place=f"{place}.folder")


def check_folder(folder: Path, *, place: str) -> Path:
    """`folder`, if it holds a config, safetensors weights and a tokenizer; raises TargetError that names what lacks."""
    if not folder.is_dir():
        raise TargetError(
            "the target's folder is missing", got=folder, expected="a Hugging Face model folder", where=place
        )
    missing = [part for part in ("config.json", "tokenizer.json") if not (folder / part).is_file()]
    if not any(folder.glob("*.safetensors")):
        missing.append("*.safetensors (weights)")
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        named = set(json.loads(index.read_text()).get("weight_map", {}).values())
        missing += sorted(part for part in named if not (folder / part).is_file())
    if missing:
        raise TargetError(
            "the target's folder is incomplete",
            got=f"{folder} without {', '.join(missing)}",
            expected="config.json, tokenizer.json and every safetensors file",
            where=place,
        )
    return folder


def check_dimensions(row: Target, config: Any, *, name: str) -> None:
    """Compare the row of target `name` with the model's own config (a Hugging Face `PretrainedConfig`).

    Raises TargetError that names each field that differs, both values and the place in params.yaml.
    """
    text, types = config.get_text_config(), FAMILIES[row.family].model_types
    if text.model_type not in types:
        raise TargetError(
            f"family {row.family} does not fit the model",
            got=f"a model of type {text.model_type}",
            expected=" or ".join(types),
            where=f"params.yaml: targets.{name}.family",
        )
    pairs = (
        ("hidden_size", row.hidden_size, text.hidden_size),
        ("num_layers", row.num_layers, text.num_hidden_layers),
        ("vocab_size", row.vocab_size, text.vocab_size),
    )
    for field, ours, theirs in pairs:
        if ours != theirs:
            raise TargetError(
                f"{field} of the row differs from the model's config",
                got=ours,
                expected=theirs,
                where=f"params.yaml: targets.{name}.{field}",
            )


def load_tokenizer(folder: Path) -> Any:
    """The fast tokenizer of a target's folder; raises TargetError if there is none that loads."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise TargetError(f"the tokenizer does not load: {one_line(error)}", where=str(folder)) from None
    if not tokenizer.is_fast:
        raise TargetError("the tokenizer is not a fast one", expected="a tokenizer.json", where=str(folder))
    return tokenizer


def load_chat_format(folder: Path) -> ChatFormat:
    """The chat format of a target's folder, with the end-of-text ids of its generation config."""
    return ChatFormat(load_tokenizer(folder), end_ids=generation_end_ids(folder))


def generation_end_ids(folder: Path) -> tuple[int, ...]:
    """`eos_token_id` of generation_config.json (one id or a list), empty if the file or the field is not there."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return ()
    value = json.loads(path.read_text()).get("eos_token_id")
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def one_line(error: BaseException) -> str:
    """The error's text on one line, cut at 300 characters."""
    return " ".join(str(error).split())[:300]


def _from_package(row: Target, package: str, *, folder: Path, place: str) -> Path:
    gguf = _package_gguf(package, place=place)
    source = {
        "package": package,
        "version": metadata.version(package),
        "file": gguf.name,
        "sha256": _file_sha256(gguf),
        "dtype": row.dtype,
        "conversion": CONVERSION,
    }
    if _is_made(folder, source):
        return folder
    _reserve(folder.parent, place=place)
    work = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        _convert(gguf, work, dtype=row.dtype)
        files = {item.name: item.stat().st_size for item in sorted(work.iterdir())}
        write_json(work / MARKER, {"source": source, "files": files})
        _swap_in(work, folder, source)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


def _package_gguf(package: str, *, place: str) -> Path:
    try:
        files = metadata.files(package) or []
    except metadata.PackageNotFoundError:
        raise TargetError(
            f"the target's weights are missing: package {package} is not installed",
            expected=DATA_COMMAND,
            where=place,
        ) from None
    found = [Path(str(item.locate())) for item in files if item.suffix == ".gguf"]
    if len(found) != 1 or not found[0].is_file():
        raise TargetError(
            f"the target's weights are missing in package {package}",
            got=f"{len(found)} GGUF files named, {sum(path.is_file() for path in found)} there",
            expected=f"exactly one; reinstall it: {DATA_COMMAND}",
            where=place,
        )
    return found[0]


def _file_sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _is_made(folder: Path, source: dict[str, Any]) -> bool:
    """Whether `folder` was made whole from `source`: its marker agrees and every file has the size recorded there."""
    try:
        marker = json.loads((folder / MARKER).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return False
    if marker.get("source") != source:
        return False
    sizes = {name: (folder / name).stat().st_size if (folder / name).is_file() else None for name in marker["files"]}
    return bool(sizes == marker["files"])


def _reserve(parent: Path, *, place: str) -> None:
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TargetError(
            f"cannot make {parent}: {error.strerror}", expected="a writable folder", where=place
        ) from None


def _swap_in(work: Path, folder: Path, source: dict[str, Any]) -> None:
    """Rename `work` to `folder`; where another process was faster with the same source, keep its folder."""
    for _ in range(2):
        try:
            os.rename(work, folder)
        except OSError:
            if _is_made(folder, source):
                return
            stale = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}.stale."))
            os.rename(folder, stale / folder.name)
            shutil.rmtree(stale, ignore_errors=True)
        else:
            return
    raise TargetError("cannot put the converted target in its place", got=folder, expected="one writer at a time")


def _convert(gguf: Path, work: Path, *, dtype: str) -> None:
    """Dequantise a GGUF file into a Hugging Face folder of `dtype` weights, mending what such files get wrong.

    Mended: padding that equals the end of turn becomes the end-of-document token; the tokenizer's length limit is the
    model's; the generation config names the end token itself instead of being derived.
    """
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    try:
        model = AutoModelForCausalLM.from_pretrained(
            str(gguf.parent),
            gguf_file=gguf.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=getattr(torch, dtype),
        )
        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    except (OSError, ValueError, KeyError) as error:
        raise TargetError(f"the GGUF file does not load: {one_line(error)}", where=str(gguf)) from None
    if tokenizer.pad_token_id == tokenizer.eos_token_id and tokenizer.unk_token is not None:
        tokenizer.pad_token = tokenizer.unk_token
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.config.pad_token_id = tokenizer.pad_token_id
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=[tokenizer.eos_token_id], pad_token_id=tokenizer.pad_token_id
    )
    try:
        model.save_pretrained(str(work))
        tokenizer.save_pretrained(str(work))
    except (OSError, SafetensorError) as error:
        raise TargetError(
            f"cannot write the converted target: {one_line(error)}",
            expected="a writable disk with room",
            where=str(work),
        ) from None
    work.chmod(0o755)
    for item in work.iterdir():
        item.chmod(0o644)
