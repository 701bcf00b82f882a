"""Whether a request drafts at all in a step: the policies of `decoding.drafting`."""

from draftsmith.decoding.drafting import (
    DraftAll,
    DraftCounts,
    DraftHistory,
    DraftNothing,
    DraftPolicy,
    Floats,
    Ints,
)

__all__ = ["DraftAll", "DraftCounts", "DraftHistory", "DraftNothing", "DraftPolicy", "Floats", "Ints"]
