"""The command line: `draftsmith STAGE --key KEY`. Heavy imports happen inside the commands."""

from __future__ import annotations

import errno
import os
import platform
import shutil
import sys
from pathlib import Path

import click

from draftsmith import __version__
from draftsmith.cli_cache import cache, plan
from draftsmith.cli_evaluate import benchmarks, compare, evaluate, report
from draftsmith.cli_options import KEY, TARGET, open_workspace
from draftsmith.cli_profile import profile
from draftsmith.cli_serve import serve
from draftsmith.errors import DraftsmithError, MachineError, StoreError

# What no code can mend: a disk that is full, read-only, broken or gone, files that are another user's.
OF_THE_MACHINE = (
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.ESTALE,
    errno.EMFILE, errno.ENFILE,
)  # fmt: skip


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__)
def cli() -> None:
    """From a target model to a trained, calibrated and evaluated drafter for speculative decoding."""


for command in (plan, cache, evaluate, benchmarks, compare, report, profile, serve):
    cli.add_command(command)


@cli.command()
def run() -> None:
    """The line for every run of params.yaml up to calibration and evaluation: says what it will take, builds what is
    stale, prints the table. `dvc repro` goes on to the profile of this machine and the serving study."""
    workspace, params = open_workspace()
    from rich.console import Console

    from draftsmith.evaluation.summary import load_reports, summary
    from draftsmith.jobs import line, serve_overlay
    from draftsmith.jobs.forecast import forecast
    from draftsmith.tracking import tracking_uri

    click.echo(forecast(workspace, params).text)
    before = line.tracked_files(workspace)
    for item in line.mend_store(workspace, params):
        click.echo(f"made {item.stage} again: store {item.store} lacked {item.prefix}")
    line.dvc(workspace, ["repro", "calibrate", "evaluate"])
    line.write_comparison(workspace, params)
    serve_overlay.write_overlay(workspace, params)
    reports = load_reports(workspace, keys=list(params.runs))
    Console().print(summary(reports, reports_dir=workspace.root / "reports", mlflow_url=tracking_uri(workspace)))
    rewritten = line.rewritten_files(workspace, before)
    if rewritten:
        click.echo(f"Figures of this machine replaced tracked ones: {', '.join(rewritten)}")


@cli.command()
def study() -> None:
    """The drafters of `study` in params.yaml side by side: equal data, equal steps, one table with intervals."""
    opened = open_workspace()
    from draftsmith.jobs import study as job

    job.run(*opened, say=click.echo)


@cli.command()
def prompts() -> None:
    """Stage prompts: sources and files -> training, validation and calibration prompts."""
    opened = open_workspace()
    from draftsmith.jobs import prompts as job

    job.run(*opened)


@cli.command()
@TARGET
def answers(name: str) -> None:
    """Stage answers@TARGET: the target answers the training and validation prompts."""
    opened = open_workspace(target=name)
    from draftsmith.jobs import answers as job

    job.run(*opened, name)


@cli.command()
@KEY
def train(key: str) -> None:
    """Stage train@KEY: train the drafter; resumes from its newest checkpoint."""
    opened = open_workspace(key=key)
    from draftsmith.jobs import train as job

    job.run(*opened, key)


@cli.command()
@KEY
def calibrate(key: str) -> None:
    """Stage calibrate@KEY: fit one temperature a position and report before and after."""
    opened = open_workspace(key=key)
    from draftsmith.jobs import calibrate as job

    job.run(*opened, key)


@cli.command()
@KEY
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0, show_default=True)
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=256, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.argument("prompt")
def generate(key: str, temperature: float, max_new_tokens: int, seed: int, prompt: str) -> None:
    """Answer PROMPT by speculative decoding; drafted tokens are green (in [brackets] off a terminal)."""
    opened = open_workspace(key=key)
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
    opened = open_workspace(key=key)
    from draftsmith.jobs import export as job

    click.echo(job.run(*opened, key, out=out).text)


@cli.group()
def target() -> None:
    """Target models."""


@target.command("fetch")
@click.argument("name", required=False)
def target_fetch(name: str | None) -> None:
    """Make or download the Hugging Face folder of a target (default: every active target)."""
    workspace, params = open_workspace(target=name)
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
    workspace, params = open_workspace()
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
