"""SpecForge's nested `config.json`, read as DeepSpec's flat one. Import only: what is saved is flat.

SpecForge keeps a Qwen3 config with the drafter's fields under `dflash_config` (some exports repeat them under
`dspark_config`). With `projector_type` dspark a block of B slots drafts B tokens, the anchor's own slot the first one;
without a projector it is the original DFlash: the mask slots draft, so a block of B slots drafts B - 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftsmith.errors import ContractError

ARCHITECTURES = ("DSparkDraftModel", "DFlashDraftModel")
MODEL_TYPES = ("qwen3", "dspark")
NESTS = ("dflash_config", "dspark_config")
SLIDING = "sliding_attention"

# Fields that say nothing about what is computed, or that are read by name below.
READ = frozenset({
    "mask_token_id", "target_layer_ids", "projector_type", "markov_rank", "markov_head_type", "block_size",
    "num_target_layers", "enable_confidence_head", "use_confidence_head", "confidence_head_with_markov",
    "confidence_head_alpha", "attention_mode", "attention_modes", "causal", "shift_label", "pure_draft_prefix_len",
})  # fmt: skip
DENSE_ATTENTION = ("gqa", "mha")


def is_nested(body: Mapping[str, Any]) -> bool:
    """Whether a config is one of SpecForge's."""
    names = body.get("architectures")
    return isinstance(names, list) and len(names) == 1 and names[0] in ARCHITECTURES


def flatten(body: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """The same drafter as a flat config. Raises ContractError for fields that contradict each other or are unknown.

    Values themselves are checked where the flat form is read.
    """
    if "speculators_model_type" in body:
        raise ContractError(
            "a drafter in the form of speculators",
            got=f"speculators_model_type {body['speculators_model_type']}",
            expected="DeepSpec's or SpecForge's form",
            where=where,
        )
    if body.get("model_type") not in MODEL_TYPES:
        raise _refusal("model_type", body.get("model_type"), " or ".join(MODEL_TYPES), where)
    nested = _nested(body, where=where)
    is_dspark = _is_dspark(body, nested, where=where)
    _check_parts(body, nested, is_dspark=is_dspark, where=where)
    flat = {name: value for name, value in body.items() if name not in (*NESTS, "auto_map")}
    flat |= {"architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "sample_from_anchor": is_dspark}
    for name in ("mask_token_id", "target_layer_ids", "num_target_layers", "block_size"):
        if (value := _pick(name, nested, body)) is not None:
            flat[name] = value
    if not is_dspark:
        if isinstance(flat.get("block_size"), int):
            flat["block_size"] -= 1
        return flat | {"markov_rank": 0, "enable_confidence_head": False}
    flat["markov_rank"] = _pick("markov_rank", nested, body, 0)
    flat["markov_head_type"] = _pick("markov_head_type", nested, body, "vanilla")
    flat["enable_confidence_head"] = _has_confidence(body, nested, where=where)
    flat["confidence_head_with_markov"] = _pick("confidence_head_with_markov", nested, body, True)
    return flat


def _nested(body: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """The fields of both nests in one; raises ContractError where they, or the flat ones, say different things."""
    found: dict[str, Any] = {}
    for nest in NESTS:
        fields = body.get(nest)
        if fields is None:
            continue
        if not isinstance(fields, dict):
            raise _refusal(nest, fields, "an object", where)
        for name, value in fields.items():
            if name not in READ:
                raise _refusal(f"unknown field {nest}.{name}", value, f"only {', '.join(sorted(READ))}", where)
            for place, other in ((nest, found.get(name, value)), ("the file", body.get(name, value))):
                if other != value:
                    raise ContractError(
                        f"two values of {name} in {nest} and in {place}", got=f"{value} and {other}", where=where
                    )
            found[name] = value
    if not found:
        raise _refusal(NESTS[0], "none", "the drafter's fields", where)
    return found


def _is_dspark(body: Mapping[str, Any], nested: Mapping[str, Any], *, where: str) -> bool:
    projector = nested.get("projector_type")
    if projector not in (None, "dspark"):
        raise _refusal("projector_type", projector, "dspark, or none", where)
    if body["architectures"] == ["DSparkDraftModel"]:
        return True
    if projector is None and _pick("markov_rank", nested, body, 0):
        raise _refusal("projector_type", "none, but markov_rank > 0", "dspark", where)
    return projector == "dspark"


def _check_parts(body: Mapping[str, Any], nested: Mapping[str, Any], *, is_dspark: bool, where: str) -> None:
    """Raises ContractError for what SpecForge can compute and our drafters cannot."""
    modes = nested.get("attention_modes") or [nested.get("attention_mode", "gqa")]
    for mode in modes if isinstance(modes, list) else [modes]:
        if mode not in DENSE_ATTENTION:
            raise _refusal("attention_mode", mode, " or ".join(DENSE_ATTENTION), where)
    if SLIDING in (body.get("layer_types") or []):
        raise ContractError(
            "SpecForge's sliding layers are causal inside a block, ours are not",
            got=body["layer_types"],
            expected="full_attention everywhere",
            where=where,
        )
    for name, wanted in (("causal", False), ("pure_draft_prefix_len", 0)):
        if _pick(name, nested, body, wanted) != wanted:
            raise _refusal(name, _pick(name, nested, body), wanted, where)
    if not is_dspark and nested.get("shift_label", False):
        raise _refusal("shift_label", True, "false without a dspark projector", where)


def _has_confidence(body: Mapping[str, Any], nested: Mapping[str, Any], *, where: str) -> Any:
    """`enable_confidence_head`, by either name; SpecForge's default is that its loss has a weight."""
    named = [nested.get(name, body.get(name)) for name in ("enable_confidence_head", "use_confidence_head")]
    given = [value for value in named if value is not None]
    if not given:
        return bool(_pick("confidence_head_alpha", nested, body, 0))
    if len(set(given)) > 1:
        raise _refusal("enable_confidence_head and use_confidence_head", given, "one value", where)
    return given[0]


def _pick(name: str, nested: Mapping[str, Any], body: Mapping[str, Any], default: Any = None) -> Any:
    return nested.get(name, body.get(name, default))


def _refusal(what: str, got: object, expected: object, where: str) -> ContractError:
    return ContractError(f"SpecForge drafter: {what}", got=got, expected=expected, where=where)
