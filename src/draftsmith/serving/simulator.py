"""A simulated engine: continuous batching of draft-verify rounds on a clock of its own.

It keeps to the real engine's ways (`decoding.session`). Between rounds, requests that wait are admitted in the order of
their arrival, nobody overtaking, while the limits allow; what is admitted is prefilled at once, in passes of its own
that are not chunked and for which everybody waits, and the first token of an answer comes at the end of its pass. Then
all requests in flight do one round: draft, ask the policy, verify, commit. A request leaves with the round that
finishes it, and the last in the batch takes its slot.

Memory is reserved at admission for all that a request will ever hold, so that nothing is preempted: a budget of
key-value tokens is never exceeded, at the price of admitting later than an engine that preempts would.

Nothing here is drawn at random but each request's recorded answer, which hangs on the seed and the request alone:
equal inputs give equal outputs to the bit, and policies are compared on the same rounds.
Letters: n requests, R requests of a step, K block size, N batch tokens of a step.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, auto

import numpy as np
from numpy.typing import ArrayLike, NDArray

from draftsmith.calibration.sts import confidence
from draftsmith.decoding.drafting import DraftAll, DraftCounts, DraftHistory, DraftPolicy
from draftsmith.decoding.policies import DraftedBlocks, LengthPolicy
from draftsmith.errors import ContractError, DraftsmithError
from draftsmith.serving.outcome import Outcome, Prefills, Steps
from draftsmith.serving.recorded import RecordedRounds
from draftsmith.serving.requests import Requests
from draftsmith.serving.step_costs import StepCosts

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Limits:
    """Most requests in flight; most key-value tokens reserved by them; most prompt tokens of a prefill pass.

    None is no limit. A prompt longer than a pass has one to itself. A request reserves prompt + output + K - 1 tokens:
    what the verification of a whole block in its last round holds.
    """

    max_requests: int
    kv_tokens: int | None = None
    prefill_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_requests", "kv_tokens", "prefill_tokens"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise DraftsmithError(f"the limit {name} of a simulation", got=value, expected=">= 1")


def simulate(
    requests: Requests,
    *,
    rounds: RecordedRounds,
    policy: LengthPolicy,
    costs: StepCosts,
    limits: Limits,
    temperatures: ArrayLike | None = None,
    drafting: DraftPolicy | None = None,
    seed: int = 0,
) -> Outcome:
    """Serve all requests to their end.

    `policy` is one of the engine's own; one that keeps a memory must be new. `temperatures` [K] are applied to the
    recorded confidences as the engine does; none leaves them raw. `drafting` decides who drafts, by default everybody.
    Raises DraftsmithError for a request that the limits can never admit, a domain that was not recorded, or lengths
    that are not 0..K; ContractError for temperatures of another block size.
    """
    run = _Run(requests, rounds, policy, costs, limits, _confidence(rounds, temperatures), drafting or DraftAll(), seed)
    while run.admit():
        run.step()
    return run.outcome()


class _Slot(IntEnum):
    """Rows of the state of the requests in flight, one column a request."""

    REQUEST = 0
    ROUND = auto()  # recorded round that is replayed next
    FIRST = auto()  # of the recorded answer
    LAST = auto()
    LEFT = auto()  # tokens to commit
    CONTEXT = auto()  # tokens of prompt and answer so far, the anchor included
    ROUNDS = auto()
    DRAFTED = auto()
    VERIFIED = auto()
    ACCEPTED = auto()
    LAST_ROUND = auto()  # recorded round that was replayed last
    LAST_DRAFTED = auto()
    LAST_VERIFIED = auto()
    LAST_ACCEPTED = auto()


class _Run:
    def __init__(
        self,
        requests: Requests,
        rounds: RecordedRounds,
        policy: LengthPolicy,
        costs: StepCosts,
        limits: Limits,
        confidences: Floats | None,
        drafting: DraftPolicy,
        seed: int,
    ) -> None:
        self._requests, self._rounds, self._policy, self._drafting = requests, rounds, policy, drafting
        self._costs, self._limits, self._confidences = costs, limits, confidences
        self._block_size = block_size = rounds.block_size
        self._reserves = requests.prompt_tokens + requests.output_tokens + (block_size - 1)
        if limits.kv_tokens is not None and (self._reserves > limits.kv_tokens).any():
            at = int(self._reserves.argmax())
            raise DraftsmithError(
                "a request that can never be admitted", got=f"{self._reserves[at]} key-value tokens",
                expected=f"<= {limits.kv_tokens}", where=f"request {at + 1}",
            )  # fmt: skip
        answers = rounds.draw_answers(requests.domains, domain=requests.domain, seed=seed)
        self._first, self._last = rounds.first[answers], rounds.last[answers]
        most = min(limits.max_requests, len(requests))
        self._verify_s = 1.0 / costs.verification.look_up(np.arange(most * (block_size + 1) + 1))
        self._draft_s, self._upkeep_s = (
            np.zeros(most + 1) if cost is None else cost.up_to(most) for cost in (costs.drafting, costs.upkeep)
        )
        self._state = np.zeros((len(_Slot), most), np.int64)
        self._num, self._reserved, self._clock = 0, 0, 0.0
        self._ids: list[str] = []
        self._ids_of_step: tuple[str, ...] | None = None
        free = np.flatnonzero(requests.independent)
        self._coming = sorted(zip(requests.arrival_s[free].tolist(), free.tolist(), strict=True))  # a heap, too
        self._waiting: deque[int] = deque()
        followed = np.flatnonzero(~requests.independent)
        self._followers = dict(zip(requests.follows[followed].tolist(), followed.tolist(), strict=True))
        self._times = np.full((4, len(requests)), np.nan)  # arrival, admission, first token, finish
        self._counts = np.zeros((4, len(requests)), np.int64)  # rounds, drafted, verified, accepted
        self._steps: list[tuple[float, ...]] = []
        self._prefills: list[tuple[float, ...]] = []

    def admit(self) -> bool:
        """Prefill who waits while there is room; if nobody is in flight then, go on to the next arrival.

        False once all is done.
        """
        while True:
            self._arrive()
            while entering := self._entering():
                self._prefill(entering)
                self._arrive()
            if self._num or not self._coming:
                return self._num > 0
            self._clock = self._coming[0][0]

    def step(self) -> None:
        """One round of all requests in flight."""
        num, state = self._num, self._state[:, : self._num]
        replayed, request_ids = state[_Slot.ROUND].copy(), self._request_ids()
        drafted = self._draft(request_ids)
        lengths = self._choose(request_ids, replayed=replayed, drafted=drafted)
        accepted, committed = self._rounds.settle(replayed, lengths=lengths)
        committed = np.minimum(committed, state[_Slot.LEFT])
        counts = np.array((drafted, lengths, accepted, committed))
        num_drafted, num_verified, num_accepted, num_committed = counts.sum(axis=1).tolist()
        context = int(state[_Slot.CONTEXT].sum())
        num_drafting, draft_s = self._drafting_cost(drafted, num_drafted)
        verify_s, upkeep_s = float(self._verify_s[num + num_verified]), float(self._upkeep_s[num])
        if self._costs.context is not None:
            verify_s += self._costs.context.seconds(context, num_requests=num)
        self._steps.append((
            self._clock, draft_s, verify_s, upkeep_s, num, num_drafting, num_drafted, num_verified, num_accepted,
            num_committed, context + num_verified, self._reserved, len(self._waiting),
        ))  # fmt: skip
        self._clock += draft_s + verify_s + upkeep_s
        state[_Slot.ROUND] = np.where(replayed == state[_Slot.LAST], state[_Slot.FIRST], replayed + 1)
        state[_Slot.LEFT] -= committed
        state[_Slot.CONTEXT] += committed
        state[_Slot.ROUNDS] += 1
        state[_Slot.DRAFTED : _Slot.LAST_ROUND] += counts[:3]
        state[_Slot.LAST_ROUND] = replayed
        state[_Slot.LAST_DRAFTED :] = counts[:3]
        self._leave()

    def outcome(self) -> Outcome:
        arrival_s, admitted_s, first_token_s, finish_s = self._times
        num_rounds, drafted, verified, accepted = self._counts
        return Outcome(
            requests=self._requests,
            arrival_s=arrival_s,
            admitted_s=admitted_s,
            first_token_s=first_token_s,
            finish_s=finish_s,
            num_rounds=num_rounds,
            drafted=drafted,
            verified=verified,
            accepted=accepted,
            steps=Steps.of(self._steps),
            prefills=Prefills.of(self._prefills),
        )

    def _arrive(self) -> None:
        """Let those wait who have come by now."""
        while self._coming and self._coming[0][0] <= self._clock:
            arrival_s, request = heapq.heappop(self._coming)
            self._times[0, request] = arrival_s
            self._waiting.append(request)

    def _entering(self) -> list[int]:
        """Who is in the next prefill pass."""
        entering: list[int] = []
        num_tokens = 0
        while self._waiting and self._num + len(entering) < self._limits.max_requests:
            request = self._waiting[0]
            reserved = self._reserved + int(self._reserves[request])
            if self._limits.kv_tokens is not None and reserved > self._limits.kv_tokens:
                break
            num_tokens += self._prefill_tokens(request)
            if entering and self._limits.prefill_tokens is not None and num_tokens > self._limits.prefill_tokens:
                break
            entering.append(self._waiting.popleft())
            self._reserved = reserved
        return entering

    def _prefill_tokens(self, request: int) -> int:
        return int(self._requests.prompt_tokens[request] - self._requests.cached_tokens[request])

    def _prefill(self, entering: list[int]) -> None:
        requests, num_tokens = self._requests, sum(map(self._prefill_tokens, entering))
        self._times[1, entering] = self._clock
        seconds = 0.0 if self._costs.prefill is None else self._costs.prefill.seconds(num_tokens)
        self._prefills.append((self._clock, seconds, len(entering), num_tokens))
        self._clock += seconds
        self._times[2, entering] = self._clock
        slots = slice(self._num, self._num + len(entering))
        columns = self._state[:, slots]
        columns[:] = 0
        columns[_Slot.REQUEST] = entering
        columns[_Slot.ROUND] = columns[_Slot.FIRST] = self._first[entering]
        columns[_Slot.LAST] = self._last[entering]
        columns[_Slot.LEFT] = requests.output_tokens[entering] - 1
        columns[_Slot.CONTEXT] = requests.prompt_tokens[entering] + 1
        self._num += len(entering)
        self._ids += map(str, entering)
        self._ids_of_step = None
        self._leave()

    def _leave(self) -> None:
        """Let those go who are finished; the last in the batch takes the slot of each."""
        state, left = self._state, self._state[_Slot.LEFT, : self._num]
        if left.all():
            return
        for slot in np.flatnonzero(left == 0)[::-1].tolist():
            request = int(state[_Slot.REQUEST, slot])
            self._times[3, request] = self._clock
            self._counts[:, request] = state[_Slot.ROUNDS : _Slot.LAST_ROUND, slot]
            self._reserved -= int(self._reserves[request])
            self._num -= 1
            last = self._ids.pop()
            if slot < self._num:
                self._ids[slot] = last
                state[:, slot] = state[:, self._num]
            if (follower := self._followers.get(request)) is not None:
                heapq.heappush(self._coming, (self._clock + float(self._requests.arrival_s[follower]), follower))
        self._ids_of_step = None

    def _request_ids(self) -> tuple[str, ...]:
        """Of the batch [R]: one tuple as long as the batch stays the same."""
        if self._ids_of_step is None:
            self._ids_of_step = tuple(self._ids)
        return self._ids_of_step

    def _draft(self, request_ids: tuple[str, ...]) -> Ints:
        """Tokens that each request drafts [R]."""
        if type(self._drafting) is DraftAll:  # which needs no history
            return np.full(self._num, self._block_size)
        return self._checked(self._drafting.draft_lengths(request_ids, self._history()), "draft lengths")

    def _drafting_cost(self, drafted: Ints, num_drafted: int) -> tuple[int, float]:
        """(requests that draft, seconds)."""
        if num_drafted == self._num * self._block_size:
            return self._num, float(self._draft_s[self._num])
        num_drafting, cost = int(np.count_nonzero(drafted)), self._costs.drafting
        share = 1.0 if cost is None else cost.share(int(drafted.max()), block_size=self._block_size)
        return num_drafting, share * float(self._draft_s[num_drafting])

    def _choose(self, request_ids: tuple[str, ...], *, replayed: Ints, drafted: Ints) -> Ints:
        """Tokens of each block that are verified [R]: the policy's lengths, no more than were drafted."""
        confidences = None if self._confidences is None else self._confidences.take(replayed, axis=0)
        shortened = bool(drafted.min() < self._block_size)
        if shortened and confidences is not None:
            confidences[np.arange(self._block_size) >= drafted[:, None]] = 0.0
        blocks = DraftedBlocks(request_ids, self._block_size, confidences)
        lengths = self._checked(self._policy(blocks), "verification lengths")
        return np.minimum(lengths, drafted) if shortened else lengths

    def _history(self) -> DraftHistory:
        state = self._state[:, : self._num]
        known = None
        if self._confidences is not None:
            known = self._confidences.take(state[_Slot.LAST_ROUND], axis=0)
            known[np.arange(self._block_size) >= state[_Slot.LAST_DRAFTED][:, None]] = np.nan
        rounds, *total = state[_Slot.ROUNDS : _Slot.LAST_ROUND].copy()
        last = state[_Slot.LAST_DRAFTED :].copy()
        return DraftHistory(self._block_size, rounds, DraftCounts(*total), DraftCounts(*last), known)

    def _checked(self, values: Sequence[int], what: str) -> Ints:
        """What a policy gave [R], checked as the engine does."""
        lengths = np.asarray(values, np.int64)
        if lengths.shape != (self._num,) or lengths.min() < 0 or lengths.max() > self._block_size:
            raise DraftsmithError(
                f"the {what} of a policy cannot be used", got=lengths.tolist(),
                expected=f"{self._num} numbers from 0 to {self._block_size}",
            )  # fmt: skip
        return lengths


def _confidence(rounds: RecordedRounds, temperatures: ArrayLike | None) -> Floats | None:
    """[N, K], as `decoding.session` makes it of logits and temperatures."""
    if rounds.logits is None:
        return None
    scales = np.ones(rounds.block_size) if temperatures is None else np.asarray(temperatures, np.float64)
    if scales.shape != (rounds.block_size,):
        raise ContractError(
            "temperatures of another block size than the rounds", got=scales.shape, expected=(rounds.block_size,)
        )
    return confidence(rounds.logits, temperatures=scales)
