"""Drafters of the evaluation's page against each other on the same prompts."""

from __future__ import annotations

from collections.abc import Sequence

from draftsmith.errors import DraftsmithError
from draftsmith.evaluation.bootstrap import Estimate
from draftsmith.evaluation.compare import pair_prompts, paired_difference, unequal_field
from draftsmith.evaluation.grid import MISSING, Grid
from draftsmith.evaluation.page_model import Page, Shown
from draftsmith.evaluation.paired import Bonus


class Differences:
    """Paired differences of the drafters of a page, each computed once: it takes seconds where prompts are many."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self._found: dict[tuple[int, int, tuple[str, ...], float, Bonus], Estimate | None] = {}

    def of(
        self, item: Shown, *, base: Shown, names: Sequence[str], temperature: float, bonus: Bonus = "with"
    ) -> Estimate | None:
        """Accepted length of `item` less that of `base`, averaged over the benchmarks in `names`.

        None where the two cannot be compared: other settings, a benchmark that one lacks, or no prompt in common.
        """
        place = (item.slot, base.slot, tuple(names), temperature, bonus)
        if place not in self._found:
            self._found[place] = _difference(item, base, names, temperature=temperature, bonus=bonus)
        return self._found[place]

    def clearly_highest(
        self, ranked: Sequence[Shown], *, names: Sequence[str], temperature: float, bonus: Bonus
    ) -> bool:
        """True if the first of `ranked` (highest first) is better than the second by an interval that excludes 0."""
        if len(ranked) < 2:
            return False
        # The earlier one on the page is the base, so that the table below it needs nothing new.
        base, item = sorted(ranked[:2], key=lambda shown: shown.slot)
        found = self.of(item, base=base, names=names, temperature=temperature, bonus=bonus)
        return found is not None and found.excludes_zero

    def grid(self, temperature: float) -> Grid | None:
        """Accepted length, bonus included, less that of the first drafter; None if there is nothing to compare."""
        page, rows = self._page, []
        base, *others = page.drafters
        for item in others:
            both = item.rows(temperature).keys() & base.rows(temperature).keys()
            names = [benchmark.name for benchmark in page.benchmarks if benchmark.name in both]
            for chosen in (*([name] for name in names), *([names] if len(names) > 1 else [])):
                found = self.of(item, base=base, names=chosen, temperature=temperature)
                if found is not None:
                    place = chosen[0] if len(chosen) == 1 else f"mean of {len(chosen)}"
                    rows.append((f"{item.label}, {place}", *_cells(found)))
        if not rows:
            return None
        return Grid(("drafter, benchmark", f"less {base.label}", "95 % interval", "excludes 0", "prompts"), tuple(rows))


def _difference(item: Shown, base: Shown, names: Sequence[str], *, temperature: float, bonus: Bonus) -> Estimate | None:
    if unequal_field(base.evaluate, item.evaluate) is not None:
        return None
    try:
        pairings = pair_prompts(base.evaluate, item.evaluate, temperature=temperature, names=(base.label, item.label))
    except DraftsmithError:
        return None  # no benchmark or no prompt in common: nothing is known of the difference
    if not set(names) <= pairings.keys():
        return None
    return paired_difference([pairings[name] for name in names], seed=base.evaluate["seed"], bonus=bonus)


def _cells(found: Estimate) -> tuple[str, ...]:
    number = f"{found.value:+.3f}"
    if found.interval is None:
        return number, MISSING, "not known", str(found.num_prompts)
    ends = f"{found.interval[0]:+.3f} to {found.interval[1]:+.3f}"
    return number, ends, "yes" if found.excludes_zero else "no", str(found.num_prompts)
