"""Requests in flight: they join and leave between rounds, and each step drafts, verifies and commits for all of them.

Live requests keep slots 0..R-1 of the key-value rows; one that leaves gives its slot to the last. Nothing is padded:
verification lengths are ragged and flat. Letters: R requests, K block size, N flat tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from draftsmith.decoding.drafting import DraftAll, DraftCounts, DraftHistory, DraftPolicy
from draftsmith.decoding.live import LiveRequest, Request
from draftsmith.decoding.policies import DraftedBlocks, LengthPolicy
from draftsmith.decoding.rounds import Generation
from draftsmith.decoding.sampling import Purpose, SamplingGroups, draw, probabilities, uniforms
from draftsmith.decoding.times import EngineTimes, Laps, StepTime
from draftsmith.decoding.verification import Outcome, RoundNumbers, verify_blocks
from draftsmith.drafters.base import Drafter, Observation, Proposal
from draftsmith.errors import TargetError
from draftsmith.nn.kv import FlatBatch
from draftsmith.params import Sampling
from draftsmith.targets.base import Target, TargetOutput

PREFILL_TOKENS = 4096
MOST_LOGIT = 700.0  # of a confidence: exp of more overflows

OnCommit = Callable[[str, list[int], list[bool]], None]
"""(request id, token ids, which of them the drafter wrote), called with the tokens of every round, once all of its
requests have theirs; it may submit and cancel."""


class Session:
    """One batch of an engine. `submit` at any time, `step` until `is_idle`; answers come out as they finish."""

    def __init__(
        self,
        target: Target,
        *,
        drafter: Drafter | None,
        end_ids: frozenset[int],
        batch_size: int,
        policy: LengthPolicy,
        temperatures: ArrayLike | None,
        drafting: DraftPolicy,
        times: EngineTimes,
        on_commit: OnCommit | None,
    ) -> None:
        self._target, self._drafter, self._policy = target, drafter, policy
        self._temperatures = 1.0 if temperatures is None else np.asarray(temperatures, np.float64)
        self._end_ids, self._batch_size = end_ids, batch_size
        self._drafting = drafting
        self._has_confidence = drafter is not None and drafter.config.confidence
        self._block_size = 0 if drafter is None else drafter.config.block_size
        self._num_waves = 1 if target.device.type == "cuda" else None
        self._times, self._on_commit = times, on_commit
        self._rows = target.new_rows()
        self._draft_rows = None if drafter is None else drafter.new_rows()
        self._waiting: deque[Request] = deque()
        self._live: list[LiveRequest] = []
        self._known: set[str] = set()
        self._grouped: tuple[SamplingGroups, SamplingGroups] | None = None

    @property
    def is_idle(self) -> bool:
        """Nothing in flight and nothing waiting."""
        return not self._live and not self._waiting

    @property
    def num_live(self) -> int:
        return len(self._live)

    def submit(self, request: Request) -> None:
        """Let a request join as soon as there is room for it.

        Raises TargetError for an empty prompt, no token to make, or the id of a request that is still here.
        """
        if request.request_id in self._known:
            raise TargetError("request ids must differ", got=f"{request.request_id} given twice")
        if not request.prompt_ids:
            raise TargetError(f"request {request.request_id} has an empty prompt")
        if request.max_new_tokens < 1:
            raise TargetError(
                f"request {request.request_id}: max_new_tokens", got=request.max_new_tokens, expected=">= 1"
            )
        self._known.add(request.request_id)
        self._waiting.append(request)

    @torch.inference_mode()
    def cancel(self, request_id: str) -> Generation:
        """Take a request out, waiting or in flight, and return what was written so far.

        Raises TargetError if it is not here.
        """
        for request in self._waiting:
            if request.request_id == request_id:
                self._waiting.remove(request)
                self._known.remove(request_id)
                return LiveRequest.begin(request, end_ids=self._end_ids).generation
        for slot, item in enumerate(self._live):
            if item.request.request_id == request_id:
                return self._leave(slot)
        raise TargetError("no such request is waiting or in flight", got=request_id)

    @torch.inference_mode()
    def step(self) -> list[Generation]:
        """Admit what waits while there is room, run one draft-verify round of all in flight, return what finished."""
        started = time.perf_counter()
        done: list[Generation] = []
        while self._waiting and len(self._live) < self._batch_size:
            self._prefill()
            done += self._finished()
        if self._live:
            self._round()
            done += self._finished()
        self._times.total_s += time.perf_counter() - started
        return done

    def _finished(self) -> list[Generation]:
        return [self._leave(slot) for slot in range(len(self._live) - 1, -1, -1) if self._live[slot].finish is not None]

    def _leave(self, slot: int) -> Generation:
        item, last = self._live[slot], self._live.pop()
        if slot < len(self._live):
            self._live[slot] = last
            self._rows.move(len(self._live), slot)
            if self._draft_rows is not None:
                self._draft_rows.move(len(self._live), slot)
        self._known.remove(item.request.request_id)
        self._grouped = None
        return item.generation

    def _prefill(self) -> None:
        """Admit requests within one token budget; the first token of an answer is no round."""
        started = time.perf_counter()
        first, budget = len(self._live), PREFILL_TOKENS
        while self._waiting and len(self._live) < self._batch_size:
            budget -= len(self._waiting[0].prompt_ids)
            if budget < 0 and len(self._live) > first:
                break
            request = self._waiting.popleft()
            self._live.append(LiveRequest.begin(request, end_ids=self._end_ids))
        self._grouped = None
        new = self._live[first:]
        counts = [len(item.tokens) for item in new]
        batch = FlatBatch.make([0] * len(new), counts=counts, slots=range(first, len(self._live)),
                               device=self._target.device)  # fmt: skip
        ids = self._tensor([token for item in new for token in item.tokens])
        output = self._target.forward(ids, batch=batch, rows=self._rows)
        ends = self._tensor((np.cumsum(counts) - 1).tolist())
        groups = SamplingGroups.make([item.request.sampling for item in new])
        chosen = self._next_tokens(self._target.logits(output.last_hidden[ends]), groups=groups, items=new)
        self._observe(ids, output, batch)
        for item, token in zip(new, chosen, strict=True):
            item.commit([token], num_draft=0)
        for item in new:
            self._tell(item, 1)
        self._times.prefill_s += time.perf_counter() - started

    def _round(self) -> None:
        """One draft-verify round of all live requests."""
        live, num = self._live, len(self._live)
        clock = Laps(self._target.device)
        positions = [item.anchor_position for item in live]
        anchors = [item.tokens[-1] for item in live]
        drafted = self._draft_lengths()
        clock.lap("sample")
        proposal = self._propose(anchors, positions=positions, drafted=drafted)
        clock.lap("draft")
        logits = self._confidence_logits(proposal, drafted=drafted)
        drafts: list[list[int]] = [[]] * num if proposal is None else proposal.tokens.tolist()
        confidence = self._confidence(logits)
        lengths = [0] * num if self._drafter is None else self._lengths(confidence, drafted=drafted)
        flat = [token for r in range(num) for token in (anchors[r], *drafts[r][: lengths[r]])]
        counts = [length + 1 for length in lengths]
        batch = FlatBatch.make(positions, counts=counts, slots=range(num), device=self._target.device)
        ids = self._tensor(flat)
        clock.lap("sample")
        output = self._target.forward(ids, batch=batch, rows=self._rows)
        clock.lap("verify")
        outcome = self._verify(output.last_hidden, proposal=proposal, lengths=lengths, clock=clock)
        kept, committed = [], []
        for r, item in enumerate(live):
            if self._drafter is None:
                item.commit([outcome.following[r]], num_draft=0)
                committed.append(1)
            else:
                row = () if logits is None or not drafted[r] else tuple(logits[r].tolist())
                verified, accepted = drafts[r][: lengths[r]], outcome.accepted[r]
                committed.append(
                    len(item.settle(verified, accepted=accepted, following=outcome.following[r], confidence=row))
                )
                item.remember(
                    drafted[r], verified=lengths[r], accepted=accepted,
                    confidence=None if confidence is None else confidence[r],
                )  # fmt: skip
                kept.append(min(accepted, committed[r]))
        clock.lap("sample")
        self._observe_committed(ids, output, batch, kept)
        clock.lap("draft")
        for item, count in zip(tuple(live), committed, strict=True):  # who is told may cancel
            self._tell(item, count)
        clock.lap("sample")
        spent = clock.seconds
        self._times.steps.append(
            StepTime(num, len(flat), sum(committed), draft_s=spent["draft"], verify_s=spent["verify"],
                     sample_s=spent["sample"])
        )  # fmt: skip

    def _draft_lengths(self) -> list[int]:
        """Tokens to draft for each request."""
        num = len(self._live)
        if self._drafter is None or type(self._drafting) is DraftAll:
            return [self._block_size] * num
        return self._checked(self._drafting.draft_lengths(self._request_ids(), self._history()), "draft lengths")

    def _history(self) -> DraftHistory:
        live, confidence = self._live, None
        if self._has_confidence:
            unknown = np.full(self._block_size, np.nan)
            confidence = np.array([unknown if item.confidence is None else item.confidence for item in live])
        total, last = (np.array([getattr(item, name) for item in live]).T for name in ("total", "last"))
        rounds = np.array([item.num_rounds - 1 for item in live])
        return DraftHistory(self._block_size, rounds, DraftCounts(*total), DraftCounts(*last), confidence)

    def _propose(self, anchors: list[int], *, positions: list[int], drafted: list[int]) -> Proposal | None:
        """A block of every live request that drafts, zeros for the others; None if nobody does.

        Draft tokens are sampled at each request's temperature, without the target's filters.
        """
        if self._drafter is None or not any(drafted):
            return None
        assert self._draft_rows is not None
        longest, members = max(drafted), [r for r, length in enumerate(drafted) if length]
        everybody = len(members) == len(drafted)
        groups = self._groups()[1]
        if not everybody:
            groups = groups.chosen(members)
        numbers = None
        if not groups.all_greedy:
            numbers = self._uniforms(range(longest), Purpose.DRAFT, [self._live[r] for r in members])

        def sample(logits: Tensor, slot: int) -> tuple[Tensor, Tensor | None]:
            if numbers is None:
                return logits.argmax(dim=1), None
            distribution = probabilities(logits, groups=groups)
            return draw(distribution, numbers=numbers[:, slot]), distribution

        proposal = self._drafter.propose(
            self._tensor([anchors[r] for r in members]), positions=[positions[r] for r in members],
            rows=self._draft_rows, sample=sample, slots=None if everybody else members, num_tokens=longest,
        )  # fmt: skip
        return proposal if everybody else proposal.among(len(drafted), members=members)

    def _confidence_logits(self, proposal: Proposal | None, *, drafted: list[int]) -> NDArray[np.float64] | None:
        """[R, K], nan in slots that were not drafted; None without a confidence head."""
        if not self._has_confidence:
            return None
        logits = np.full((len(drafted), self._block_size), np.nan)
        if proposal is not None:
            assert proposal.confidence_logits is not None
            given = proposal.confidence_logits.double().cpu().numpy()
            logits[:, : given.shape[1]] = given
            if min(drafted) < self._block_size:
                logits[np.arange(self._block_size) >= np.array(drafted)[:, None]] = np.nan
        return logits

    def _confidence(self, logits: NDArray[np.float64] | None) -> NDArray[np.float64] | None:
        """Logits [R, K] -> probabilities, the calibration's temperatures applied."""
        if logits is None:
            return None
        return 1.0 / (1.0 + np.exp(-np.clip(logits / self._temperatures, -MOST_LOGIT, MOST_LOGIT)))

    def _lengths(self, confidence: NDArray[np.float64] | None, *, drafted: list[int]) -> list[int]:
        """What the policy has verified of each block: no more than was drafted."""
        known = None
        if confidence is not None:
            known = np.where(np.arange(self._block_size) < np.array(drafted)[:, None], confidence, 0.0)
        blocks = DraftedBlocks(self._request_ids(), self._block_size, known)
        lengths = self._checked(self._policy(blocks), "verification lengths")
        return [min(length, most) for length, most in zip(lengths, drafted, strict=True)]

    def _checked(self, values: Sequence[int], what: str) -> list[int]:
        """What a policy gave, one number a request."""
        lengths = [int(length) for length in values]
        if len(lengths) != len(self._live) or not all(0 <= length <= self._block_size for length in lengths):
            raise TargetError(
                f"the {what} of a policy cannot be used", got=lengths,
                expected=f"{len(self._live)} numbers from 0 to {self._block_size}",
            )  # fmt: skip
        return lengths

    def _request_ids(self) -> tuple[str, ...]:
        return tuple(item.request.request_id for item in self._live)

    def _verify(self, last_hidden: Tensor, *, proposal: Proposal | None, lengths: list[int], clock: Laps) -> Outcome:
        """Accepted tokens and the token that follows, of each request; the time of the LM head is the target's."""

        def logits_of(hidden: Tensor) -> Tensor:
            clock.lap("sample")
            logits = self._target.logits(hidden)
            clock.lap("verify")
            return logits

        groups = self._groups()[0]
        if proposal is None:
            chosen = self._next_tokens(logits_of(last_hidden), groups=groups, items=self._live)
            return Outcome([0] * len(chosen), chosen)
        numbers = None
        if not groups.all_greedy:
            numbers = RoundNumbers(
                accept=self._uniforms(range(self._block_size), Purpose.ACCEPT),
                target=self._uniforms((0,), Purpose.TARGET)[:, 0],
            )
        return verify_blocks(
            last_hidden, logits_of=logits_of, proposal=proposal, lengths=lengths, groups=groups, numbers=numbers,
            num_waves=self._num_waves,
        )  # fmt: skip

    def _tell(self, item: LiveRequest, num_committed: int) -> None:
        self._times.num_tokens += num_committed
        if self._on_commit is not None:
            self._on_commit(item.request.request_id, item.tokens[-num_committed:], item.drafted[-num_committed:])

    def _groups(self) -> tuple[SamplingGroups, SamplingGroups]:
        """How the live requests are sampled: from the target, and from the drafter."""
        if self._grouped is None:
            own = [item.request.sampling for item in self._live]
            bare = {sampling: Sampling(temperature=sampling.temperature) for sampling in set(own)}
            self._grouped = SamplingGroups.make(own), SamplingGroups.make([bare[sampling] for sampling in own])
        return self._grouped

    def _next_tokens(self, logits: Tensor, *, groups: SamplingGroups, items: list[LiveRequest]) -> list[int]:
        """Sample the next token of each of `items` from the target itself; logits [R, V]."""
        if groups.all_greedy:
            return logits.argmax(dim=1).tolist()
        numbers = self._uniforms((0,), Purpose.TARGET, items)[:, 0]
        return draw(probabilities(logits, groups=groups), numbers=numbers).tolist()

    def _uniforms(
        self, slots: Sequence[int], purpose: Purpose, items: list[LiveRequest] | None = None
    ) -> NDArray[np.float64]:
        """Numbers of the current round [R, S]."""
        chosen = self._live if items is None else items
        return uniforms(
            [item.request.seed for item in chosen],
            rounds=[item.num_rounds for item in chosen],
            slots=slots,
            purpose=purpose,
        )

    def _observe(self, ids: Tensor, output: TargetOutput, batch: FlatBatch) -> None:
        if self._drafter is not None:
            assert self._draft_rows is not None
            observation = Observation(ids, output.captured, output.last_hidden, batch)
            self._drafter.observe(observation, rows=self._draft_rows)

    def _observe_committed(self, ids: Tensor, output: TargetOutput, batch: FlatBatch, kept: list[int]) -> None:
        """Show the drafter each round's anchor and committed draft tokens."""
        if self._drafter is None:
            return
        firsts = np.cumsum([0, *batch.counts[:-1]])
        index = [first + step for first, count in zip(firsts, kept, strict=True) for step in range(count + 1)]
        rows = self._tensor(index)
        chosen = FlatBatch.make(
            batch.starts, counts=[count + 1 for count in kept], slots=batch.slots, device=ids.device
        )
        self._observe(ids[rows], TargetOutput(output.captured[rows], output.last_hidden[rows]), chosen)

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._target.device)
