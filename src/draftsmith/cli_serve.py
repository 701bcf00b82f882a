"""The command serve."""

from __future__ import annotations

from pathlib import Path

import click

from draftsmith.cli_options import KEY, open_workspace


@click.command()
@KEY
@click.option(
    "--profile",
    metavar="NAME|FILE",
    help="An example profile, or the file of a profile or SPS table of another machine (default: this machine's).",
)
@click.option(
    "--trace", type=click.Path(path_type=Path), help="Requests to replay as well: .csv or .jsonl (see serve.trace)."
)
def serve(key: str, profile: str | None, trace: Path | None) -> None:
    """Stage serve@KEY: verification policies under load, simulated with the evaluation's rounds on a profiled machine.

    With --profile or --trace the reports go to serve-<name>.* and leave those of the stage alone.
    """
    opened = open_workspace(key=key)
    from draftsmith.jobs import serve as job

    click.echo(job.run(*opened, key, profile=profile, trace=trace))
