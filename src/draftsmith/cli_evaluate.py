"""Commands of evaluation: evaluate, benchmarks, compare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from draftsmith.cli_options import open_workspace
from draftsmith.paths import Workspace


@click.command()
@click.option("--key", help="A row of `runs` in params.yaml: everything else is in its row.")
@click.option("--slice", "part", metavar="I/N", help="With --key: only decode cells i, i+n, ...; no report.")
@click.option("--drafter", type=click.Path(path_type=Path), help="A drafter's folder.")
@click.option("--target", type=click.Path(path_type=Path), help="A target's Hugging Face folder.")
@click.option(
    "--prompts", type=click.Path(path_type=Path), help='JSON lines of {"turns": ["...", ...]}, with or without `id`.'
)
@click.option("--out", type=click.Path(path_type=Path), help="The report, a JSON file.")
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0, show_default=True)
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), default=1.0, show_default=True)
@click.option("--top-k", type=click.IntRange(min=0), default=0, show_default="all")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=256, show_default=True, help="Of each answer.")
@click.option("--batch-size", type=click.IntRange(min=1), default=8, show_default=True, help="Answers in flight.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), default="bfloat16", show_default=True)
@click.option("--system-prompt", help="Default: the one that the drafter was made with.")
@click.pass_context
def evaluate(context: click.Context, /, key: str | None, part: str | None, **options: Any) -> None:
    """Stage evaluate@KEY: speculative against plain decoding on the benchmarks; or any drafter on any prompts.

    Without --key, from any folder: --drafter DIR --target DIR --prompts FILE --out FILE.
    """
    given = [name for name in options if context.get_parameter_source(name) is not ParameterSource.DEFAULT]
    told = ", ".join(f"--{name.replace('_', '-')}" for name in given)
    if key is not None:
        if given:
            raise click.UsageError(f"--key takes its settings from params.yaml and goes without {told}")
        opened = open_workspace(key=key)
        from draftsmith.jobs import evaluate as job
        from draftsmith.jobs.cache import parse_slice

        job.run(*opened, key, part=parse_slice(part))
        return
    if part is not None:
        raise click.UsageError("--slice cuts the evaluation of a --key")
    missing = [f"--{name}" for name in ("drafter", "target", "prompts", "out") if options[name] is None]
    if missing:
        raise click.UsageError(f"either --key, or --drafter, --target, --prompts and --out: no {', '.join(missing)}")
    from draftsmith.jobs import evaluate_files

    click.echo(evaluate_files.run(evaluate_files.Arguments(**options)))


@click.command()
def benchmarks() -> None:
    """The benchmarks there are: source, revision, turns, licence, and whether they can be read here."""
    opened = open_workspace()
    from draftsmith.jobs import benchmarks as job

    click.echo(job.run(*opened))


@click.command()
def report() -> None:
    """All runs side by side, from the reports that are there: reports/comparison.md and comparison.html, and of the
    serving studies serving.md and serving.html."""
    opened = open_workspace()
    from draftsmith.jobs import line, serve_overlay

    for path in (*line.write_comparison(*opened), *serve_overlay.write_overlay(*opened)):
        click.echo(path)


@click.command()
@click.argument("baseline")
@click.argument("candidate")
@click.option("--margin", type=click.FloatRange(min=0), default=0.05, show_default=True,
              help="Accepted length that may be lost.")  # fmt: skip
@click.option("--temperature", type=click.FloatRange(min=0), help="Compare at this one alone (default: at each).")
def compare(baseline: str, candidate: str, margin: float, temperature: float | None) -> None:
    """Is CANDIDATE better or worse than BASELINE, or within noise? Leaves with status 1 on a regression.

    Each is a key of params.yaml, a folder with an evaluate.json, or such a file.
    """
    from draftsmith.jobs import compare as job

    workspace = Workspace.find() if not (Path(baseline).exists() and Path(candidate).exists()) else None
    found = job.run(baseline, candidate, margin=margin, temperature=temperature, workspace=workspace)
    click.echo(found.text)
    if found.regressed:
        raise SystemExit(1)
