"""How figures are drawn: matplotlib's object-oriented interface and the Agg canvas, no global state."""

from __future__ import annotations

import io

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

DPI = 110


def new_figure(width: float, *, height: float, title: str) -> Figure:
    """An empty figure with a title; sizes in inches."""
    figure = Figure(figsize=(width, height), layout="constrained", dpi=DPI)
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=11)
    return figure


def png_bytes(figure: Figure) -> bytes:
    """The figure as a PNG without a version stamp, so that equal figures are equal files."""
    stream = io.BytesIO()
    figure.savefig(stream, format="png", metadata={"Software": None})
    return stream.getvalue()
