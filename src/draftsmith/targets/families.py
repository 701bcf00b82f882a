"""The table of target families: one file a family, one entry here."""

from __future__ import annotations

from draftsmith.targets import gemma4, llama, qwen3
from draftsmith.targets.base import Family

FAMILIES: dict[str, Family] = {family.name: family for family in (llama.FAMILY, qwen3.FAMILY, gemma4.FAMILY)}
