"""What to set in vLLM and SGLang for each load, computed from a serving study.

At each concurrency that was simulated the best of the policies that an engine can run is taken; where a simpler one is
as good within the error, that one (no speculation before fixed lengths before a scheduler). Neighbours that agree form
a band. What can be run, and its flags, is in `engines`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from draftsmith.evaluation.grid import Grid, markdown
from draftsmith.serving.engines import (
    ENGINES,
    NAMES,
    SOURCES,
    Drafter,
    Engine,
    Launch,
    fixed_launch,
    has_schedule,
    has_scheduler,
    plain_launch,
    refusal,
    schedule_launch,
    scheduler_launch,
)

Body = Mapping[str, Any]
PLAIN = "none"
BY_LOAD = "draft tokens by the requests in flight"
SERVED_STALENESS = 2
"""Steps between confidences and the budget made of them: SGLang's default (and the paper's)."""


@dataclass(frozen=True)
class Option:
    """Something that an engine can run, and the policy of the study that stands for it.

    `num_draft_tokens`: K of a fixed length, 0 for none, None for a scheduler.
    """

    policy: str
    num_draft_tokens: int | None
    label: str


@dataclass(frozen=True)
class Setting:
    """What to set in an engine from `first` to `last` requests in flight (inclusive; None: no higher load was studied).

    `gains`: tokens a second over plain decoding at the simulated concurrencies of the band, lowest and highest, less 1.
    """

    engine: Engine
    first: int
    last: int | None
    concurrencies: tuple[int, ...]
    policy: str
    label: str
    num_draft_tokens: int | None
    gains: tuple[float, float]
    why: str
    launch: Launch


@dataclass(frozen=True)
class OneServer:
    """A single server for all loads: its launch, and its worst share of the engine's best, at which concurrency."""

    label: str
    worst_share: float
    concurrency: int
    launch: Launch


@dataclass(frozen=True)
class EngineSettings:
    """The table of one engine. `plain_from`: the concurrency from which on it should not speculate, if any."""

    engine: Engine
    rows: tuple[Setting, ...]
    one_server: OneServer
    plain_from: int | None
    notes: tuple[str, ...]


def recommend(study: Body, *, sample_from_anchor: bool = True) -> tuple[EngineSettings, ...]:
    """Settings for each engine from a study (the body of serve.json or one of its what-ifs)."""
    facts = study["drafter"]
    drafter = Drafter(facts["kind"], int(facts["block_size"]), bool(facts["confidence"]), sample_from_anchor)
    return tuple(_Table(engine, drafter, study).settings() for engine in ENGINES)


def settings_body(settings: Sequence[EngineSettings]) -> list[dict[str, Any]]:
    """The part `engine_settings` of serve.json, JSON values only."""
    found = []
    for item in settings:
        made = asdict(item)
        for row, launch in [*zip(made["rows"], (row.launch for row in item.rows), strict=True),
                            (made["one_server"], item.one_server.launch)]:  # fmt: skip
            row["launch"]["command"] = list(launch.command)
            row["launch"] |= {"sidecars": list(launch.sidecars), "shell": launch.shell}
        for row in made["rows"]:
            row |= {name: list(row[name]) for name in ("concurrencies", "gains")}
        found.append(
            made | {"rows": list(made["rows"]), "notes": list(item.notes), "sources": list(SOURCES[item.engine])}
        )
    return found


def settings_grid(item: EngineSettings) -> Grid:
    """One row a band."""
    rows = []
    for row in item.rows:
        tokens = {None: "by the scheduler", 0: "none"}.get(row.num_draft_tokens, str(row.num_draft_tokens))
        low, high = (f"{100 * gain:+.1f} %" for gain in row.gains)
        rows.append((band(row), row.label, tokens, low if low == high else f"{low} to {high}", row.why))
    return Grid(("requests in flight", "set", "draft tokens", "tokens/s over no drafter", "because"), tuple(rows))


def band(row: Setting) -> str:
    """`1`, `2 to 7`, or `8 and more`."""
    if row.last is None:
        return f"{row.first} and more"
    return str(row.first) if row.first == row.last else f"{row.first} to {row.last}"


def settings_markdown(study: Body, settings: Sequence[EngineSettings]) -> str:
    """The page reports/<key>/settings.md."""
    lines = [f"# Engine settings for {study['key']}", ""]
    if study["synthetic"]:
        lines += ["**Synthetic: nothing below was measured.**", ""]
    lines += [str(study["note"]), ""]
    for item in settings:
        lines += [f"## {NAMES[item.engine]}", "", markdown(settings_grid(item))]
        lines += [f"{end_sentence(item)} {one_server_sentence(item)}", ""]
        lines += ["Commands, by requests in flight:", "", "```sh"]
        lines += [line for row in item.rows for line in (f"# {band(row)}", row.launch.shell)]
        lines += ["# one server for all of them", item.one_server.launch.shell, "```", ""]
        lines += [f"`{name}`: `{body}`\n" for name, body in item.one_server.launch.written.items()]
        lines += [f"- {note}" for note in item.notes]
        lines += ["", f"Read from: {'; '.join(SOURCES[item.engine])}.", ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def end_sentence(item: EngineSettings) -> str:
    """From which load on the engine should not speculate."""
    most = max(row.concurrencies[-1] for row in item.rows)
    if item.plain_from is None:
        return f"{NAMES[item.engine]}: speculation pays up to the highest load studied, {most} requests in flight."
    if item.plain_from == 1:
        return f"{NAMES[item.engine]}: no speculation at any load studied (1 to {most} requests in flight)."
    return f"{NAMES[item.engine]}: no speculation from {item.plain_from} requests in flight on."


def one_server_sentence(item: EngineSettings) -> str:
    """What to start if there is one server for all loads."""
    one = item.one_server
    return (
        f"One server for all loads: {one.label}; at its worst, {one.concurrency} in flight, it has "
        f"{100 * one.worst_share:.1f} % of the tokens/s of the best setting there."
    )


class _Table:
    """The settings of one engine, in the making."""

    def __init__(self, engine: Engine, drafter: Drafter, study: Body) -> None:
        self.engine, self.drafter = engine, drafter
        self.points = {
            entry["policy"]: {point["concurrency"]: point for point in entry["points"]} for entry in study["pareto"]
        }
        self.loads = sorted(self.points[PLAIN])
        self.best = {row["concurrency"]: row for row in study["best_by_concurrency"]}
        self.max_requests = int(study["limits"]["max_requests"])
        temperature = study["rounds"]["temperature"]
        self.sampled = temperature is None or temperature > 0
        self.options = self._options(study["policies"])

    def settings(self) -> EngineSettings:
        chosen = [self._choose(load) for load in self.loads]
        starts = [place for place, option in enumerate(chosen) if place == 0 or option != chosen[place - 1]]
        rows = []
        for start, end in zip(starts, [*starts[1:], len(chosen)], strict=True):
            last = self.loads[end] - 1 if end < len(chosen) else None
            rows.append(self._row(chosen[start], tuple(self.loads[start:end]), last))
        plain = rows[-1].num_draft_tokens == 0
        one = self._one_server()
        return EngineSettings(
            self.engine, tuple(rows), one, rows[-1].first if plain else None, tuple(self._notes(rows, one))
        )

    def _options(self, policies: Sequence[Body]) -> list[Option]:
        """Simplest first; `none` is always one."""
        found = [Option(PLAIN, 0, "no speculation")]
        if refusal(self.engine, self.drafter) is not None:
            return found
        plain = [item for item in policies if item["early_exit"] is None]
        for item in plain:
            if item["kind"] == "fixed":
                tokens = int(item["parameter"])
                label = f"{tokens} draft token{'' if tokens == 1 else 's'} a round, all verified"
                found.append(Option(item["name"], tokens, label))
        if has_scheduler(self.engine, self.drafter):
            label = f"{NAMES[self.engine]}'s own scheduler on whole blocks"
            found += [Option(item["name"], None, label) for item in plain if _is_served(item)]
        return found

    def _rate(self, option: Option, load: int) -> float:
        return float(self.points[option.policy][load]["tokens_per_s"])

    def _choose(self, load: int) -> Option:
        best = max(self.options, key=lambda option: self._rate(option, load))
        return next(option for option in self.options if option is best or self._as_good(option, best, load))

    def _as_good(self, option: Option, best: Option, load: int) -> bool:
        """By the study's paired comparison where the engine's best is the study's, else by error bars that meet."""
        found = self.best[load]
        if best.policy == found["policy"]:
            return option.policy in found["as_good"]
        upper, lower = self.points[option.policy][load], self.points[best.policy][load]
        reached = self._rate(option, load) * (1 + upper["tokens_per_s_error"])
        return reached >= self._rate(best, load) * (1 - lower["tokens_per_s_error"])

    def _row(self, option: Option, loads: tuple[int, ...], last: int | None) -> Setting:
        gains = [self._rate(option, load) / self._rate(self.options[0], load) - 1 for load in loads]
        return Setting(
            self.engine, loads[0], last, loads, option.policy, option.label, option.num_draft_tokens,
            (min(gains), max(gains)), self._why(option, loads), self._launch(option),
        )  # fmt: skip

    def _launch(self, option: Option) -> Launch:
        if option.num_draft_tokens == 0:
            return plain_launch(self.engine, max_requests=self.max_requests)
        if option.num_draft_tokens is None:
            return scheduler_launch(self.engine, self.drafter, max_requests=self.max_requests, sampled=self.sampled)
        return fixed_launch(
            self.engine, self.drafter, num_draft_tokens=option.num_draft_tokens, max_requests=self.max_requests,
            sampled=self.sampled,
        )  # fmt: skip

    def _why(self, option: Option, loads: Sequence[int]) -> str:
        """Against the strongest of the other options where it matters most; loads are those of the band."""
        others = [other for other in self.options if other is not option]
        if not others:
            return "nothing else can be run"
        load = max(loads, key=lambda at: abs(self._lead(option, others, at)[0]))
        lead, other = self._lead(option, others, load)
        at = f"at {load} in flight"
        if lead < 0:
            return f"{other.label}: {-100 * lead:.1f} % more {at}, within the error; this is simpler"
        kept = self.points[option.policy][load]
        why = f"{100 * lead:.1f} % more tokens/s than {other.label} {at}"
        if option.num_draft_tokens == 0:
            return why
        return f"{why}; {kept['accepted_length']:.2f} tokens a round of {kept['budget']:.1f} verified"

    def _lead(self, option: Option, others: Sequence[Option], load: int) -> tuple[float, Option]:
        other = max(others, key=lambda item: self._rate(item, load))
        return self._rate(option, load) / self._rate(other, load) - 1, other

    def _one_server(self) -> OneServer:
        """The option, or where the engine has it the schedule by batch size, that loses least at its worst load."""
        ceiling = {load: max(self._rate(option, load) for option in self.options) for load in self.loads}
        found = []
        for option in self.options:
            shares = {load: self._rate(option, load) / ceiling[load] for load in self.loads}
            found.append((shares, option.label, self._launch(option)))
        if has_schedule(self.engine, self.drafter):
            steps, shares = self._steps(ceiling)
            if len(steps) > 1:
                launch = schedule_launch(
                    self.engine, self.drafter, steps=steps, max_requests=self.max_requests, sampled=self.sampled
                )
                found.append((shares, BY_LOAD, launch))
        shares, label, launch = max(found, key=lambda item: min(item[0].values()))
        worst = min(shares, key=lambda load: shares[load])
        return OneServer(label, shares[worst], worst, launch)

    def _steps(self, ceiling: Mapping[int, float]) -> tuple[list[tuple[int, int, int]], dict[int, float]]:
        """Bands of the best fixed number of draft tokens, and the share of the ceiling that they reach."""
        steps: list[tuple[int, int, int]] = []
        shares = {}
        for load, following in zip(self.loads, [*self.loads[1:], self.max_requests + 1], strict=True):
            fixed = [option for option in self.options if option.num_draft_tokens is not None]
            best = max(fixed, key=lambda option: self._rate(option, load))
            option = next(item for item in fixed if item is best or self._as_good(item, best, load))
            tokens = option.num_draft_tokens or 0
            shares[load] = self._rate(option, load) / ceiling[load]
            if steps and steps[-1][2] == tokens:
                steps[-1] = (steps[-1][0], following - 1, tokens)
            else:
                steps.append((load, following - 1, tokens))
        return steps, shares

    def _notes(self, rows: Sequence[Setting], one: OneServer) -> list[str]:
        refused = refusal(self.engine, self.drafter)
        if refused is not None:
            return [f"{refused}; so only plain decoding is set."]
        name = NAMES[self.engine]
        notes = [
            f"{name} has no static threshold on confidence and no early exit of single requests; these are left out."
        ]
        if has_scheduler(self.engine, self.drafter):
            notes.append(_SCHEDULER_NOTES[self.engine])
        if all(row.num_draft_tokens == 0 for row in rows):
            return notes
        lengths = {row.num_draft_tokens for row in rows} | ({1} if one.label == BY_LOAD else set())
        if self.drafter.kind in ("dspark", "dflash") and any(0 < (tokens or 0) < self.drafter.block_size
                                                             for tokens in lengths):  # fmt: skip
            notes.append(
                f"Fewer draft tokens than the block size {self.drafter.block_size} make {name} draft a shorter block; "
                "the study cut the drafts of whole blocks."
            )
        if self.engine == "sglang":
            notes.append("Draft tokens are counted with the anchor: one more than the study's.")
            if len(rows) > 1 and not has_schedule(self.engine, self.drafter):
                notes.append("One SGLang server keeps one setting: route by load to servers of either kind.")
            return notes
        if one.label == BY_LOAD:
            notes.append("Draft tokens by batch size are not for data parallelism (vLLM then takes the most).")
        if self.sampled:
            notes.append("Drafts are sampled, as they were in the study; vLLM's default is the likeliest token.")
        return notes


_SCHEDULER_NOTES: Mapping[Engine, str] = {
    "vllm": (
        "vLLM's scheduler profiles costs and fits temperatures by itself and reads neither sps.json nor sts.json; it "
        "searches all budgets, so the study's asynchronous scheduler stands for it."
    ),
    "sglang": (
        "SGLang's scheduler reads sps.json and sts.json; the study's asynchronous scheduler, two steps stale, stands "
        "for it."
    ),
}


def _is_served(policy: Body) -> bool:
    return policy["kind"] == "asynchronous" and int(policy["parameter"]) == SERVED_STALENESS
