"""Batched lossless speculative decoding: what is decoded with, and how. The loop itself is in `session`.

All drafters go through the same loop; without a drafter it is plain decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from numpy.typing import ArrayLike

from draftsmith.decoding.drafting import DraftAll, DraftPolicy
from draftsmith.decoding.live import Request
from draftsmith.decoding.policies import LengthPolicy, verify_all
from draftsmith.decoding.rounds import Generation
from draftsmith.decoding.session import OnCommit, Session
from draftsmith.decoding.times import EngineTimes, StepTime
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.contract import check_engine
from draftsmith.errors import TargetError
from draftsmith.targets.base import Target

__all__ = ["Engine", "EngineTimes", "Request", "Session", "StepTime"]


class Engine:
    """Decodes requests with a target and, if given, a drafter."""

    def __init__(
        self,
        target: Target,
        *,
        drafter: Drafter | None,
        end_ids: Iterable[int],
        batch_size: int,
        policy: LengthPolicy = verify_all,
        temperatures: ArrayLike | None = None,
        drafting: DraftPolicy | None = None,
    ) -> None:
        """`batch_size`: most requests in flight; `end_ids`: tokens that end an answer (kept as its last token).

        `policy` decides how many tokens of each block are verified, on confidences to which the calibration's
        `temperatures` [K] are applied; none leaves them as the drafter gave them. `drafting` decides which requests
        draft and how far, by default all of them whole blocks.
        Raises ContractError if the drafter is of another hidden size, vocabulary or other captured layers.
        """
        if drafter is not None:
            check_engine(drafter.config, target=target)
        self.target, self.drafter, self.policy, self.temperatures = target, drafter, policy, temperatures
        self.drafting = drafting or DraftAll()
        self.end_ids = frozenset(end_ids)
        self.batch_size = batch_size
        self.times = EngineTimes()

    def session(self, *, on_commit: OnCommit | None = None) -> Session:
        """An empty batch, which requests can join and leave at any round. Its times add to the engine's."""
        return Session(
            self.target,
            drafter=self.drafter,
            end_ids=self.end_ids,
            batch_size=self.batch_size,
            policy=self.policy,
            temperatures=self.temperatures,
            drafting=self.drafting,
            times=self.times,
            on_commit=on_commit,
        )

    def generate(
        self,
        requests: Sequence[Request],
        *,
        on_finish: Callable[[Generation], None] | None = None,
        on_commit: OnCommit | None = None,
    ) -> list[Generation]:
        """Answer all requests; results in the order given.

        `on_commit(request_id, token_ids, drafted)` is called with the tokens of every round as they are committed.
        Raises TargetError for an empty prompt or an id given twice.
        """
        ids = [request.request_id for request in requests]
        if len(set(ids)) != len(ids):
            raise TargetError("request ids must differ", got=f"{len(ids) - len(set(ids))} given twice")
        session = self.session(on_commit=on_commit)
        for request in requests:
            session.submit(request)
        done: dict[str, Generation] = {}
        while not session.is_idle:
            for generation in session.step():
                done[generation.request_id] = generation
                if on_finish is not None:
                    on_finish(generation)
        return [done[request.request_id] for request in requests]
