"""Errors that a user can mend: each names what is wrong, what was got, what was expected and where to mend it."""

from __future__ import annotations


class DraftsmithError(Exception):
    """Base of every user error; the command line prints its text as one message and leaves with status 2."""

    def __init__(self, what: str, *, got: object = None, expected: object = None, where: str | None = None) -> None:
        """Compose `what: got X, expected Y (where)`; parts that are None are left out."""
        parts = []
        if got is not None:
            parts.append(f"got {got}")
        if expected is not None:
            parts.append(f"expected {expected}")
        text = what + (": " + ", ".join(parts) if parts else "") + (f" ({where})" if where else "")
        super().__init__(text)
        self.what, self.got, self.expected, self.where = what, got, expected, where


class ParamsError(DraftsmithError):
    """params.yaml is missing, malformed or inconsistent, or a key or target is not in it."""


class StoreError(DraftsmithError):
    """The store cannot be reached, read or written (credentials, permissions, a full disk)."""


class ObjectMissingError(StoreError):
    """An object or prefix that something names is not in the store."""


class ObjectExistsError(StoreError):
    """A put-if-absent met an object that was there already."""


class ObjectChangedError(StoreError):
    """A put-if-match met an object that had changed since it was read."""


class PromptError(DraftsmithError):
    """A prompt source or file cannot be used as it is."""


class TargetError(DraftsmithError):
    """A target model, its tokenizer or its template cannot be loaded or does not fit its row."""


class CacheError(DraftsmithError):
    """A target cache is inconsistent with its plan or manifest."""


class ShardClaimedError(CacheError):
    """Another live process holds the claim on a shard."""


class ContractError(DraftsmithError):
    """A drafter meets a target, a cache or an engine that it was not made for."""


class TrainingError(DraftsmithError):
    """Training cannot start or go on (no valid anchor, NaN loss, a broken checkpoint)."""


class CalibrationError(DraftsmithError):
    """There is too little data to calibrate, or it is unfit."""


class MachineError(DraftsmithError):
    """The machine lacks something: a program, a port, an operating system that is supported."""
