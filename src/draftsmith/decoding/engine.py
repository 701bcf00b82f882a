"""Batched lossless speculative decoding: draft, verify, accept, commit, for many requests at once.

All drafters go through this one loop; without a drafter it is plain decoding. Requests join and leave between
rounds; live requests keep slots 0..R-1. Letters: R requests, K block size, N flat tokens, V vocabulary.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from draftsmith.decoding.accept import verify_greedy, verify_sampled
from draftsmith.decoding.rounds import Generation, Round
from draftsmith.decoding.sampling import Purpose, draw, is_greedy, probabilities, uniforms
from draftsmith.drafters.base import Drafter, Observation, Proposal
from draftsmith.drafters.contract import check_engine
from draftsmith.errors import TargetError
from draftsmith.nn.kv import FlatBatch
from draftsmith.params import Sampling
from draftsmith.targets.base import Target, TargetOutput

PREFILL_TOKENS = 4096

LengthPolicy = Callable[[Tensor | None, int, int], list[int]]
"""(raw confidence logits [R, K] or None, R, K) -> verification length of each request, 0..K."""


def verify_all(_confidence_logits: Tensor | None, num_requests: int, block_size: int) -> list[int]:
    """Full-length verification."""
    return [block_size] * num_requests


@dataclass(frozen=True)
class Request:
    """One prompt to answer. `seed` fixes its sampling whoever shares the batch."""

    request_id: str
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling
    seed: int


@dataclass
class EngineTimes:
    """Seconds spent in the parts of the loop, and what came of it."""

    prefill_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    sample_s: float = 0.0
    total_s: float = 0.0
    num_steps: int = 0
    num_tokens: int = 0


@dataclass
class _Live:
    """A request in flight; `tokens` are prompt and answer, the last one is the anchor."""

    request: Request
    tokens: list[int]
    drafted: list[bool] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    num_rounds: int = 0
    finish: str | None = None

    @property
    def anchor_position(self) -> int:
        return len(self.tokens) - 1

    @property
    def room(self) -> int:
        return self.request.max_new_tokens - len(self.drafted)


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
    ) -> None:
        """`batch_size`: most requests in flight; `end_ids`: tokens that end an answer (kept as its last token).

        Raises ContractError if the drafter is of another hidden size, vocabulary or other captured layers.
        """
        if drafter is not None:
            check_engine(drafter.config, target=target)
        self.target, self.drafter, self.policy = target, drafter, policy
        self.end_ids = frozenset(end_ids)
        self.batch_size = batch_size
        self.block_size = 0 if drafter is None else drafter.config.block_size
        self.times = EngineTimes()

    def generate(
        self,
        requests: Sequence[Request],
        *,
        on_finish: Callable[[Generation], None] | None = None,
        on_commit: Callable[[str, list[int], list[bool]], None] | None = None,
    ) -> list[Generation]:
        """Answer all requests; results in the order given.

        `on_commit(request_id, token_ids, drafted)` is called with the tokens of every round as they are committed.
        Raises TargetError for an empty prompt or an id given twice.
        """
        _check(requests)
        started = time.perf_counter()
        self._rows = self.target.new_rows()
        self._draft_rows = None if self.drafter is None else self.drafter.new_rows()
        self._on_commit = on_commit
        pending, live = deque(requests), list[_Live]()
        done: dict[str, Generation] = {}

        def leave() -> None:
            for slot in range(len(live) - 1, -1, -1):
                if live[slot].finish is None:
                    continue
                generation = _generation(live[slot])
                done[generation.request_id] = generation
                last = live.pop()
                if slot < len(live):
                    live[slot] = last
                    self._rows.move(len(live), slot)
                    if self._draft_rows is not None:
                        self._draft_rows.move(len(live), slot)
                if on_finish is not None:
                    on_finish(generation)

        with torch.inference_mode():
            while pending or live:
                while pending and len(live) < self.batch_size:
                    self._prefill(live, pending)
                leave()
                if live:
                    self._round(live)
                    leave()
        self.times.total_s += time.perf_counter() - started
        return [done[request.request_id] for request in requests]

    def _prefill(self, live: list[_Live], pending: deque[Request]) -> None:
        """Admit requests within one token budget; the first token of an answer is no round."""
        started = time.perf_counter()
        first = len(live)
        budget = PREFILL_TOKENS
        while pending and len(live) < self.batch_size:
            budget -= len(pending[0].prompt_ids)
            if budget < 0 and len(live) > first:
                break
            request = pending.popleft()
            live.append(_Live(request, list(request.prompt_ids)))
        new = live[first:]
        counts = [len(item.tokens) for item in new]
        batch = FlatBatch.make([0] * len(new), counts=counts, slots=range(first, len(live)), device=self.target.device)
        ids = torch.tensor([token for item in new for token in item.tokens], device=self.target.device)
        output = self.target.forward(ids, batch=batch, rows=self._rows)
        ends = torch.tensor(np.cumsum(counts) - 1, device=self.target.device)
        chosen = self._next_tokens(self.target.logits(output.last_hidden[ends]), new)
        self._observe(ids, output, batch)
        for item, token in zip(new, chosen, strict=True):
            item.num_rounds += 1
            self._commit(item, [token], [False])
        self.times.prefill_s += time.perf_counter() - started

    def _round(self, live: list[_Live]) -> None:
        """One draft-verify round of all live requests."""
        device, size, num = self.target.device, self.block_size, len(live)
        positions = [item.anchor_position for item in live]
        anchors = [item.tokens[-1] for item in live]
        clock = time.perf_counter()
        proposal, lengths = None, [0] * num
        drafts: list[list[int]] = [[]] * num
        if self.drafter is not None:
            assert self._draft_rows is not None
            proposal = self.drafter.propose(
                torch.tensor(anchors, device=device),
                positions=positions,
                rows=self._draft_rows,
                sample=lambda logits, slot: self._sample_draft(logits, slot, live),
            )
            lengths = self.policy(proposal.confidence_logits, num, size)
            drafts = proposal.tokens.tolist()
        clock = self._lap("draft_s", clock)
        flat = [token for r in range(num) for token in (anchors[r], *drafts[r][: lengths[r]])]
        batch = FlatBatch.make(positions, counts=[length + 1 for length in lengths], slots=range(num), device=device)
        ids = torch.tensor(flat, device=device)
        output = self.target.forward(ids, batch=batch, rows=self._rows)
        logits = self.target.logits(output.last_hidden)
        clock = self._lap("verify_s", clock)
        if proposal is None:
            accepted, following = [0] * num, self._next_tokens(logits, live)
        else:
            accepted, following = self._verify(logits, proposal, lengths, batch, live)
        confidence = None if proposal is None else proposal.confidence_logits
        confidences = [()] * num if confidence is None else [tuple(row) for row in confidence.tolist()]
        kept = []
        for r, item in enumerate(live):
            item.num_rounds += 1
            kept.append(self._settle(item, drafts[r], lengths[r], accepted[r], following[r], confidences[r]))
        self._observe_committed(ids, output, batch, kept)
        self.times.num_steps += 1
        self._lap("sample_s", clock)

    def _settle(
        self, item: _Live, draft: list[int], verified: int, accepted: int, following: int, confidence: tuple[float, ...]
    ) -> int:
        """Commit a round's tokens to one request; returns how many draft tokens were committed."""
        position = item.anchor_position
        tokens = [*draft[:accepted], following]
        ended = next((index for index, token in enumerate(draft[:accepted]) if token in self.end_ids), None)
        if ended is not None:
            tokens = tokens[: ended + 1]
        room = item.room
        tokens = tokens[:room]
        if self.drafter is not None:
            item.rounds.append(
                Round(
                    anchor_position=position,
                    verified=verified,
                    accepted=accepted if ended is None else ended + 1,
                    committed=len(tokens),
                    ended=ended is not None,
                    cut=len(tokens) < (accepted + 1 if ended is None else ended + 1),
                    confidence_logits=confidence,
                )
            )
        num_draft = min(accepted, len(tokens))
        self._commit(item, tokens, [index < num_draft for index in range(len(tokens))])
        return num_draft

    def _commit(self, item: _Live, tokens: list[int], drafted: list[bool]) -> None:
        item.tokens.extend(tokens)
        item.drafted.extend(drafted)
        self.times.num_tokens += len(tokens)
        if item.tokens[-1] in self.end_ids:
            item.finish = "end_of_text"
        elif item.room <= 0:
            item.finish = "length"
        if self._on_commit is not None:
            self._on_commit(item.request.request_id, tokens, drafted)

    def _verify(
        self, logits: Tensor, proposal: Proposal, lengths: list[int], batch: FlatBatch, live: list[_Live]
    ) -> tuple[list[int], list[int]]:
        """Flat target logits [N, V] -> accepted prefix and next token of each request."""
        num, width = len(live), self.block_size + 1
        device = logits.device
        greedy = [is_greedy(item.request.sampling) for item in live]
        limits = torch.tensor(lengths, device=device)
        if min(lengths) < self.block_size:
            grid = logits.new_zeros(num * width, logits.shape[1])
            offset = torch.repeat_interleave(torch.arange(num, device=device) * width, limits + 1)
            within = batch.positions - torch.repeat_interleave(torch.tensor(batch.starts, device=device), limits + 1)
            logits = grid.index_copy_(0, offset + within, logits)
        logits = logits.view(num, width, -1)
        accepted = torch.zeros(num, dtype=torch.int64, device=device)
        following = torch.zeros(num, dtype=torch.int64, device=device)
        rows = torch.tensor([r for r in range(num) if greedy[r]], dtype=torch.int64, device=device)
        if len(rows):
            accepted[rows], following[rows] = verify_greedy(
                proposal.tokens[rows], target_ids=logits[rows].argmax(-1), lengths=limits[rows]
            )
        others = [r for r in range(num) if not greedy[r]]
        if others:
            rows = torch.tensor(others, dtype=torch.int64, device=device)
            items = [live[r] for r in others]
            assert proposal.probabilities is not None
            samplings = [item.request.sampling for item in items for _ in range(width)]
            chosen = logits if len(others) == num else logits[rows]
            target = probabilities(chosen.reshape(-1, logits.shape[-1]), samplings=samplings).view(chosen.shape)
            numbers = np.stack([self._uniforms(items, slot, Purpose.ACCEPT) for slot in range(self.block_size)], axis=1)
            verdict = verify_sampled(
                proposal.tokens[rows],
                draft=proposal.probabilities if len(others) == num else proposal.probabilities[rows],
                target=target,
                lengths=limits[rows],
                numbers=torch.from_numpy(numbers).to(device),
            )
            accepted[rows] = verdict.accepted
            following[rows] = draw(verdict.next_distribution, numbers=self._uniforms(items, 0, Purpose.TARGET))
        return accepted.tolist(), following.tolist()

    def _sample_draft(self, logits: Tensor, slot: int, live: list[_Live]) -> tuple[Tensor, Tensor | None]:
        """Sample draft tokens at each request's temperature; the filters of the target are not applied to drafts."""
        samplings = [Sampling(temperature=item.request.sampling.temperature) for item in live]
        if all(is_greedy(sampling) for sampling in samplings):
            return logits.argmax(dim=1), None
        distribution = probabilities(logits, samplings=samplings)
        return draw(distribution, numbers=self._uniforms(live, slot, Purpose.DRAFT)), distribution

    def _next_tokens(self, logits: Tensor, live: list[_Live]) -> list[int]:
        """Sample the next token of each request from the target itself; logits [R, V]."""
        samplings = [item.request.sampling for item in live]
        if all(is_greedy(sampling) for sampling in samplings):
            return logits.argmax(dim=1).tolist()
        distribution = probabilities(logits, samplings=samplings)
        return draw(distribution, numbers=self._uniforms(live, 0, Purpose.TARGET)).tolist()

    def _uniforms(self, live: list[_Live], slot: int, purpose: Purpose) -> np.ndarray:
        return uniforms(
            [item.request.seed for item in live],
            rounds=[item.num_rounds for item in live],
            slot=slot,
            purpose=purpose,
        )

    def _observe(self, ids: Tensor, output: TargetOutput, batch: FlatBatch) -> None:
        if self.drafter is not None:
            assert self._draft_rows is not None
            observation = Observation(ids, output.captured, output.last_hidden, batch)
            self.drafter.observe(observation, rows=self._draft_rows)

    def _observe_committed(self, ids: Tensor, output: TargetOutput, batch: FlatBatch, kept: list[int]) -> None:
        """Show the drafter each round's anchor and committed draft tokens."""
        if self.drafter is None:
            return
        firsts = np.cumsum([0, *batch.counts[:-1]])
        index = [first + step for first, count in zip(firsts, kept, strict=True) for step in range(count + 1)]
        rows = torch.tensor(index, device=ids.device)
        chosen = FlatBatch.make(
            batch.starts, counts=[count + 1 for count in kept], slots=batch.slots, device=ids.device
        )
        self._observe(ids[rows], TargetOutput(output.captured[rows], output.last_hidden[rows]), chosen)

    def _lap(self, part: str, since: float) -> float:
        now = time.perf_counter()
        setattr(self.times, part, getattr(self.times, part) + now - since)
        return now


def _generation(item: _Live) -> Generation:
    return Generation(
        request_id=item.request.request_id,
        token_ids=tuple(item.tokens[len(item.request.prompt_ids) :]),
        drafted=tuple(item.drafted),
        finish="end_of_text" if item.finish == "end_of_text" else "length",
        rounds=tuple(item.rounds),
    )


def _check(requests: Sequence[Request]) -> None:
    ids = [request.request_id for request in requests]
    if len(set(ids)) != len(ids):
        raise TargetError("request ids must differ", got=f"{len(ids) - len(set(ids))} given twice")
    for request in requests:
        if not request.prompt_ids:
            raise TargetError(f"request {request.request_id} has an empty prompt")
        if request.max_new_tokens < 1:
            raise TargetError(
                f"request {request.request_id}: max_new_tokens", got=request.max_new_tokens, expected=">= 1"
            )
