"""The command profile."""

from __future__ import annotations

from pathlib import Path

import click

from draftsmith.cli_options import open_workspace


@click.command()
@click.option("--key", help="A row of `runs` in params.yaml: measure its engine on this machine.")
@click.option(
    "--check",
    metavar="NAME|FILE",
    help="Say what is understood of an example profile, or of a profile or SPS table measured elsewhere (.json, .csv).",
)
@click.option("--out", type=click.Path(path_type=Path), help="With --check: write SGLang's form of its table there.")
def profile(key: str | None, check: str | None, out: Path | None) -> None:
    """Stage profile@KEY: seconds of a step by batch tokens, requests and context, measured with the real engine.

    Writes profile.json, .csv and .png, and sps.json in SGLang's form, to the key's reports. With --check instead of
    --key nothing is measured.
    """
    if (key is None) == (check is None):
        raise click.UsageError("either --key or --check")
    if key is not None:
        if out is not None:
            raise click.UsageError("--out goes with --check; --key writes to its reports")
        opened = open_workspace(key=key)
        from draftsmith.jobs import profile as job

        click.echo(job.run(*opened, key))
        return
    from draftsmith.jobs import profile as job

    for line in job.describe(str(check), out=out):
        click.echo(line)
