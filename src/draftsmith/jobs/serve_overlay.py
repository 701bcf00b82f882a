"""reports/serving.md and serving.html: the serving studies of all keys side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from draftsmith.errors import DraftsmithError
from draftsmith.manifest import write_bytes
from draftsmith.params import Params
from draftsmith.paths import Workspace
from draftsmith.serving.overlay import overlay, overlay_markdown
from draftsmith.serving.overlay_page import overlay_page

TITLE = "Serving: drafters side by side"


def write_overlay(workspace: Workspace, params: Params) -> list[Path]:
    """Both files, from reports/<key>/serve.json of the runs of params.yaml that have one; none written if none has.

    Raises DraftsmithError for a report that cannot be used.
    """
    bodies = [body for key in params.runs if (body := _read(workspace.report_dir(key) / "serve.json")) is not None]
    if not bodies:
        return []
    targets = {key: params.run(key).target for key in params.runs}
    body = overlay(bodies, targets=targets)
    folder = workspace.root / "reports"
    made = {"serving.md": overlay_markdown(body), "serving.html": overlay_page(body, title=TITLE)}
    for name, text in made.items():
        write_bytes(folder / name, text.encode())
    return [folder / name for name in made]


def _read(path: Path) -> Any:
    """A body; None where there is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError:
        raise DraftsmithError("a report is not JSON", expected="run the serve stage again", where=str(path)) from None
