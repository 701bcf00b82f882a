"""What several commands share: options, and the working copy with its params."""

from __future__ import annotations

import click

from draftsmith.params import Params, load_params
from draftsmith.paths import Workspace

KEY = click.option("--key", required=True, help="A row of `runs` in params.yaml.")
TARGET = click.option("--target", "name", required=True, help="A row of `targets` in params.yaml.")


def open_workspace(*, key: str | None = None, target: str | None = None) -> tuple[Workspace, Params]:
    """Params come before a command's imports, so that a mistyped name is told at once."""
    workspace = Workspace.find()
    params = load_params(workspace.params)
    if key is not None:
        params.run(key)
    if target is not None:
        params.target(target)
    return workspace, params
