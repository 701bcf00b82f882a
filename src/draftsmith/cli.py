"""The command line: `draftsmith STAGE --key KEY`. Heavy imports happen inside the commands."""

from __future__ import annotations

import errno
import json
import os
import platform
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from draftsmith import __version__
from draftsmith.errors import DraftsmithError, MachineError, StoreError
from draftsmith.params import load_params
from draftsmith.paths import Workspace

if TYPE_CHECKING:
    from draftsmith.params import Params

# What no code can mend: a disk that is full, read-only, broken or gone, files that are another user's.
OF_THE_MACHINE = (
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.ESTALE,
    errno.EMFILE, errno.ENFILE,
)  # fmt: skip

KEY = click.option("--key", required=True, help="A row of `runs` in params.yaml.")
TARGET = click.option("--target", "name", required=True, help="A row of `targets` in params.yaml.")


def _open(*, key: str | None = None, target: str | None = None) -> tuple[Workspace, Params]:
    """Params come before a command's imports, so that a mistyped name is told at once."""
    workspace = Workspace.find()
    params = load_params(workspace.params)
    if key is not None:
        params.run(key)
    if target is not None:
        params.target(target)
    return workspace, params


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__)
def cli() -> None:
    """From a target model to a trained, calibrated and evaluated drafter for speculative decoding."""


@cli.command()
def run() -> None:
    """The whole line for every run of params.yaml: says what it will take, builds what is stale, prints the table."""
    workspace, params = _open()
    from rich.console import Console

    from draftsmith.evaluation.summary import load_reports, summary
    from draftsmith.jobs import line
    from draftsmith.jobs.forecast import forecast
    from draftsmith.tracking import tracking_uri

    click.echo(forecast(workspace, params).text)
    before = line.tracked_files(workspace)
    for item in line.mend_store(workspace, params):
        click.echo(f"made {item.stage} again: store {item.store} lacked {item.prefix}")
    line.dvc(workspace, ["repro"])
    line.write_comparison(workspace, params)
    reports = load_reports(workspace, keys=list(params.runs))
    Console().print(summary(reports, reports_dir=workspace.root / "reports", mlflow_url=tracking_uri(workspace)))
    rewritten = line.rewritten_files(workspace, before)
    if rewritten:
        click.echo(f"Figures of this machine replaced tracked ones: {', '.join(rewritten)}")


@cli.command()
def study() -> None:
    """The drafters of `study` in params.yaml side by side: equal data, equal steps, one table with intervals."""
    opened = _open()
    from draftsmith.jobs import study as job

    job.run(*opened, say=click.echo)


@cli.command()
def prompts() -> None:
    """Stage prompts: sources and files -> training, validation and calibration prompts."""
    opened = _open()
    from draftsmith.jobs import prompts as job

    job.run(*opened)


@cli.command()
@TARGET
def answers(name: str) -> None:
    """Stage answers@TARGET: the target answers the training and validation prompts."""
    opened = _open(target=name)
    from draftsmith.jobs import answers as job

    job.run(*opened, name)


@cli.command()
@TARGET
@click.option("--tokens", metavar="N", help="Plan for so many tokens: 1240000000, 1.24G, 1e9.")
@click.option("--answers", type=click.Path(path_type=Path), help="An answers manifest (default: the target's own).")
@click.option("--mean-length", type=click.FloatRange(min=2), help="With --tokens: tokens a sample.")
@click.option("--label-share", type=click.FloatRange(min=0, max=1), help="With --tokens: share of tokens with a label.")
@click.option("--tokens-per-s", type=click.FloatRange(min=0, min_open=True), help="What one device computes.")
@click.option("--price-per-tb-month", type=click.FloatRange(min=0), envvar="DRAFTSMITH_PRICE_PER_TB_MONTH",
              show_envvar=True, help="Price of storage.")  # fmt: skip
@click.option("--ratio", type=click.FloatRange(min=0, min_open=True), help="Compression of the target's codec.")
@click.option("--json", "as_json", is_flag=True, help="Figures as JSON.")
def plan(
    name: str, tokens: str | None, answers: Path | None, mean_length: float | None, label_share: float | None,
    tokens_per_s: float | None, price_per_tb_month: float | None, ratio: float | None, as_json: bool,
) -> None:  # fmt: skip
    """What a target cache will take, before anything is computed: bytes, shards, requests, hours, cost."""
    if tokens is not None and answers is not None:
        raise click.UsageError("--tokens plans for a number of tokens, --answers for those of a file: give one of them")
    opened = _open(target=name)
    from draftsmith.jobs import plan as job

    estimate = job.run(
        *opened, name, tokens=None if tokens is None else job.parse_tokens(tokens), answers=answers,
        mean_length=mean_length, label_share=label_share,
        tokens_per_s=tokens_per_s, price_per_tb_month=price_per_tb_month, ratio=ratio,
    )  # fmt: skip
    click.echo(json.dumps(estimate.to_json(), indent=1) if as_json else estimate.text)


@cli.group()
def cache() -> None:
    """The target cache: captured hidden states as sharded Zarr."""


@cache.command("build")
@TARGET
@click.option("--slice", "part", metavar="I/N", help="Only shards i, i+n, ...; no manifest.")
def cache_build(name: str, part: str | None) -> None:
    """Stage cache@TARGET: write every shard (or a slice of them), then the manifest."""
    opened = _open(target=name)
    from draftsmith.jobs import cache as job

    job.run(*opened, name, part=job.parse_slice(part))


@cache.command("verify")
@TARGET
@click.option("--deep", is_flag=True, help="Read and hash every object, however many there are.")
@click.option("--sample-bytes", type=click.IntRange(min=1), help="Hash a random sample of so many bytes.")
def cache_verify(name: str, deep: bool, sample_bytes: int | None) -> None:
    """Stage verify@TARGET: the store holds what the manifest names."""
    opened = _open(target=name)
    from draftsmith.jobs import verify as job

    click.echo(job.run(*opened, name, deep=deep, sample_bytes=sample_bytes).text)


@cache.command("show")
@TARGET
@click.argument("sample_id")
def cache_show(name: str, sample_id: str) -> None:
    """One sample of the cache: its text, mask, shapes and norms, read by byte ranges."""
    opened = _open(target=name)
    from draftsmith.jobs import show as job

    click.echo(job.run(*opened, name, sample_id))


@cache.command("fidelity")
@KEY
@click.option("--states-only", is_flag=True, help="Measure the decoded states; train no drafters.")
def cache_fidelity(key: str, states_only: bool) -> None:
    """What each codec changes: states, logits, and the drafter of KEY trained from a cache of each."""
    opened = _open(key=key)
    from draftsmith.jobs import fidelity as job

    click.echo(job.run(*opened, key, states_only=states_only))


@cache.command("gc")
@click.option("--older-than", default="7d", show_default=True, help="Keep what is younger: 90m, 12h, 7d.")
@click.option("--yes", is_flag=True, help="Delete without asking.")
def cache_gc(older_than: str, yes: bool) -> None:
    """Delete caches that no commit, no working copy and no live claim names."""
    workspace, _ = _open()
    from draftsmith.jobs import gc as job

    found = job.find(workspace, older_than_s=job.parse_age(older_than))
    click.echo(found.text)
    if not found.doomed:
        return
    if not yes:
        click.confirm("Delete them?", abort=True)
    click.echo(job.delete(workspace, found))


@cli.command()
@KEY
def train(key: str) -> None:
    """Stage train@KEY: train the drafter; resumes from its newest checkpoint."""
    opened = _open(key=key)
    from draftsmith.jobs import train as job

    job.run(*opened, key)


@cli.command()
@KEY
def calibrate(key: str) -> None:
    """Stage calibrate@KEY: fit one temperature a position and report before and after."""
    opened = _open(key=key)
    from draftsmith.jobs import calibrate as job

    job.run(*opened, key)


@cli.command()
@click.option("--key", help="A row of `runs` in params.yaml: everything else is in its row.")
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
def evaluate(context: click.Context, /, key: str | None, **options: Any) -> None:
    """Stage evaluate@KEY: speculative against plain decoding on the benchmarks; or any drafter on any prompts.

    Without --key, from any folder: --drafter DIR --target DIR --prompts FILE --out FILE.
    """
    given = [name for name in options if context.get_parameter_source(name) is not ParameterSource.DEFAULT]
    told = ", ".join(f"--{name.replace('_', '-')}" for name in given)
    if key is not None:
        if given:
            raise click.UsageError(f"--key takes its settings from params.yaml and goes without {told}")
        opened = _open(key=key)
        from draftsmith.jobs import evaluate as job

        job.run(*opened, key)
        return
    missing = [f"--{name}" for name in ("drafter", "target", "prompts", "out") if options[name] is None]
    if missing:
        raise click.UsageError(f"either --key, or --drafter, --target, --prompts and --out: no {', '.join(missing)}")
    from draftsmith.jobs import evaluate_files

    click.echo(evaluate_files.run(evaluate_files.Arguments(**options)))


@cli.command()
@KEY
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0, show_default=True)
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=256, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.argument("prompt")
def generate(key: str, temperature: float, max_new_tokens: int, seed: int, prompt: str) -> None:
    """Answer PROMPT by speculative decoding; drafted tokens are green (in [brackets] off a terminal)."""
    opened = _open(key=key)
    from draftsmith.jobs import generate as job

    def write(text: str) -> None:
        click.echo(text, nl=False, color=True)
        sys.stdout.flush()

    done = job.run(
        *opened, key, prompt=prompt, temperature=temperature, max_new_tokens=max_new_tokens, seed=seed, write=write
    )
    rounds = f"{done.num_rounds} rounds, {done.num_drafted} tokens drafted" if done.num_rounds else "no round"
    click.echo(f"\n{done.num_tokens} tokens in {rounds}, {done.tokens_per_s:.1f} tokens/s", err=True)


@cli.group()
def export() -> None:
    """A trained drafter as a directory that others read."""


@export.command("deepspec")
@KEY
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The folder to write.")
def export_deepspec(key: str, out: Path) -> None:
    """DeepSpec's flat form, whole: the drafter with its target's embedding and LM head."""
    opened = _open(key=key)
    from draftsmith.jobs import export as job

    click.echo(job.run(*opened, key, out=out).text)


@cli.group()
def target() -> None:
    """Target models."""


@target.command("fetch")
@click.argument("name", required=False)
def target_fetch(name: str | None) -> None:
    """Make or download the Hugging Face folder of a target (default: every active target)."""
    workspace, params = _open(target=name)
    from draftsmith.jobs.parts import target_folder

    for item in [name] if name else params.active_targets:
        click.echo(f"{item}: {target_folder(workspace, params, item).folder}")


@cli.group()
def store() -> None:
    """The store that holds answers, caches and checkpoints."""


@store.command("check")
@click.option("--mend", is_flag=True, help="Run the stages again whose prefixes the store lacks.")
def store_check(mend: bool) -> None:
    """Compare the current store with the manifests of this working copy."""
    workspace, params = _open()
    from draftsmith.jobs import line

    missing = line.mend_store(workspace, params) if mend else line.check_store(workspace, params)
    for item in missing:
        done = "made again" if mend else f"run `dvc repro -f -s {item.stage}`"
        click.echo(f"{item.stage}: store {item.store} lacks {item.prefix}: {done}")
    if not missing:
        click.echo(f"store {workspace.store_uri} holds everything that the manifests name")
    elif not mend:
        raise SystemExit(1)


@store.command("copy")
@click.argument("source")
@click.argument("destination")
@click.option("--prefix", default="", help="Only objects below this prefix.")
def store_copy(source: str, destination: str, prefix: str) -> None:
    """Copy objects from store SOURCE to store DESTINATION (folders or s3://bucket/prefix)."""
    from draftsmith.storage import copy_prefix, open_store

    report = copy_prefix(open_store(source), open_store(destination), prefix=prefix)
    click.echo(
        f"{report.num_copied} objects copied ({report.num_bytes} bytes), {report.num_present} were there already"
    )


def main() -> None:
    """Run the command line; a user error is one message on stderr and status 2."""
    if platform.system() not in ("Linux", "Darwin"):
        sys.exit(f"draftsmith: runs on Linux and macOS, not on {platform.system()}")
    if shutil.which("nvidia-smi") is None:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    try:
        cli(standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except DraftsmithError as error:
        sys.exit(_refuse(error))
    except OSError as error:
        if error.errno not in OF_THE_MACHINE:
            raise
        what = f"cannot read or write {error.filename or Path.cwd()}: {error.strerror}"
        sys.exit(_refuse(StoreError(what, expected="a disk with room, in order, and files that this user may use")))


def _refuse(error: DraftsmithError) -> int:
    where = "machine" if isinstance(error, MachineError) else "error"
    click.echo(f"draftsmith: {where}: {error}", err=True)
    return 2


if __name__ == "__main__":
    main()
