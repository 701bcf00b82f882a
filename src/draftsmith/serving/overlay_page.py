"""The page of several serving studies: the frontier of each drafter in one figure, group by group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftsmith.evaluation.grid import Grid, number, percent
from draftsmith.evaluation.page_document import document
from draftsmith.evaluation.page_html import escape, notice, paragraph, plot_text, section, table
from draftsmith.evaluation.page_plot import DASHES, SYMBOLS, Figure, Trace, axis, colour, figure_html, layout
from draftsmith.serving.overlay import NO_DRAFTER, anchors_grid, group_title, overlay_notices
from draftsmith.serving.page_closed import RATE, SPEED, WIDE_RANGE, scale
from draftsmith.serving.page_marks import made_up, watermark
from draftsmith.serving.page_model import hovering, rounded, short, signed, users

Body = Mapping[str, Any]


def overlay_page(body: Body, *, title: str) -> str:
    """The whole page as HTML, from `overlay.overlay`."""
    sections = [(f"group-{place}", group_title(place, group)) for place, group in enumerate(body["groups"], start=1)]
    told = "".join(notice(name, text) for name, text in overlay_notices(body))
    parts = [
        _group(name, heading, group, before=told if place == 0 else "")
        for place, ((name, heading), group) in enumerate(zip(sections, body["groups"], strict=True))
    ]
    return document(title=title, sections=sections, body="".join(parts), without_script="figures")


def _group(name: str, heading: str, group: Body, *, before: str) -> str:
    lead = (
        "The frontier of each drafter: its points in the closed loop that no other of its policies beats in both "
        "figures. All drafters here were studied under the settings below."
    )
    settings = Grid(("setting", "value"), tuple((key, value) for key, value in group["settings"].items()))
    caption = "At the speed that users must get"
    how = (
        "Tokens a second of all users while the median user gets the speed at the head of the column, by the drafter's "
        "best policy there; gains over plain decoding of the same key; >= where no higher load was studied."
    )
    sign = made_up(str(group["scenario"])) if group["synthetic"] else ""
    shown = figure_html(frontier_figure(name, group), subtitle=f"{heading}; {group['settings']['machine']}")
    made = (
        sign
        + "".join(paragraph(note) for note in group["notes"])
        + shown
        + f"<h3>{escape(caption)}</h3>{paragraph(how, kind='basis')}"
        + table(anchors_grid(group), caption=caption)
        + table(settings, caption="Settings")
    )
    return section(name, heading, lead=lead, before=before, body=made)


def frontier_figure(name: str, group: Body) -> Figure:
    """One line a drafter; plain decoding in the colour of text."""
    traces: list[Trace] = []
    lines: list[tuple[str, ...]] = []
    shown = [*((item, place, False) for place, item in enumerate(group["series"])),
             *((item, place, True) for place, item in enumerate(group["plain"]))]  # fmt: skip
    for item, place, plain in shown:
        points = item["points"]
        shade = "var(--ink)" if plain else colour(place if place < 5 else place + 1)
        texts = [_text(item["label"], point) for point in points]
        symbol = f"{SYMBOLS[place % len(SYMBOLS)]}{'-open' if plain else ''}"
        traces.append({
            "type": "scatter", "mode": "lines+markers", "name": plot_text(item["label"]),
            "x": rounded([point["user_tokens_per_s"] for point in points]),
            "y": rounded([point["tokens_per_s"] for point in points]),
            "line": {"color": shade, "width": 1.5 if plain else 2.5, "dash": DASHES[place % len(DASHES)]},
            "marker": {"color": shade, "size": 8, "symbol": symbol},
            **hovering(texts),
        })  # fmt: skip
        lines += [_numbers(item["label"], point) for point in points]
    found = [point for item, _, _ in shown for point in item["points"]]
    loads = [point["concurrency"] for point in found]
    wide = max(loads) >= WIDE_RANGE * min(loads)
    return Figure(
        name=f"frontiers-{name}",
        title="Throughput against speed for one user, by drafter",
        traces=traces,
        layout=layout(
            x=axis(SPEED, **scale([point["user_tokens_per_s"] for point in found], wide=wide)),
            y=axis(RATE, **scale([point["tokens_per_s"] for point in found], wide=wide)),
            **(watermark() if group["synthetic"] else {}),
        ),
        numbers=Grid(
            ("drafter, users", "policy", "tokens/s", "median user's tokens/s", "over no drafter", "accepted length",
             "budget", "acceptance"),
            tuple(lines),
        ),
        note="A click on the legend shows or hides a drafter.",
        height=480,
    )  # fmt: skip


def _policy(point: Body) -> str:
    return str(point.get("policy", NO_DRAFTER))


def _text(label: str, point: Body) -> str:
    return "\n".join(
        (
            f"{label}, {users(point['concurrency'])}: {_policy(point)}",
            f"{short(point['tokens_per_s'])} tokens/s, {short(point['user_tokens_per_s'])} for the median user",
            f"{signed(point['speedup'] - 1)} over no drafter",
            f"accepted length {point['accepted_length']:.2f} of {point['budget']:.2f} verified",
        )
    )


def _numbers(label: str, point: Body) -> tuple[str, ...]:
    return (
        f"{label}, {users(point['concurrency'])}",
        _policy(point),
        short(point["tokens_per_s"]),
        short(point["user_tokens_per_s"]),
        signed(point["speedup"] - 1),
        number(point["accepted_length"], digits=2),
        number(point["budget"], digits=2),
        percent(point["acceptance"]),
    )
