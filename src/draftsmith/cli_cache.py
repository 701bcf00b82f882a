"""Commands of the target cache: plan, build, verify, show, fidelity, gc."""

from __future__ import annotations

import json
from pathlib import Path

import click

from draftsmith.cli_options import KEY, TARGET, open_workspace


@click.command()
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
    opened = open_workspace(target=name)
    from draftsmith.jobs import plan as job

    estimate = job.run(
        *opened, name, tokens=None if tokens is None else job.parse_tokens(tokens), answers=answers,
        mean_length=mean_length, label_share=label_share,
        tokens_per_s=tokens_per_s, price_per_tb_month=price_per_tb_month, ratio=ratio,
    )  # fmt: skip
    click.echo(json.dumps(estimate.to_json(), indent=1) if as_json else estimate.text)


@click.group()
def cache() -> None:
    """The target cache: captured hidden states as sharded Zarr."""


@cache.command("build")
@TARGET
@click.option("--slice", "part", metavar="I/N", help="Only shards i, i+n, ...; no manifest.")
def cache_build(name: str, part: str | None) -> None:
    """Stage cache@TARGET: write every shard (or a slice of them), then the manifest."""
    opened = open_workspace(target=name)
    from draftsmith.jobs import cache as job

    job.run(*opened, name, part=job.parse_slice(part))


@cache.command("verify")
@TARGET
@click.option("--deep", is_flag=True, help="Read and hash every object, however many there are.")
@click.option("--sample-bytes", type=click.IntRange(min=1), help="Hash a random sample of so many bytes.")
def cache_verify(name: str, deep: bool, sample_bytes: int | None) -> None:
    """Stage verify@TARGET: the store holds what the manifest names."""
    opened = open_workspace(target=name)
    from draftsmith.jobs import verify as job

    click.echo(job.run(*opened, name, deep=deep, sample_bytes=sample_bytes).text)


@cache.command("show")
@TARGET
@click.argument("sample_id")
def cache_show(name: str, sample_id: str) -> None:
    """One sample of the cache: its text, mask, shapes and norms, read by byte ranges."""
    opened = open_workspace(target=name)
    from draftsmith.jobs import show as job

    click.echo(job.run(*opened, name, sample_id))


@cache.command("fidelity")
@KEY
@click.option("--states-only", is_flag=True, help="Measure the decoded states; train no drafters.")
def cache_fidelity(key: str, states_only: bool) -> None:
    """What each codec changes: states, logits, and the drafter of KEY trained from a cache of each."""
    opened = open_workspace(key=key)
    from draftsmith.jobs import fidelity as job

    click.echo(job.run(*opened, key, states_only=states_only))


@cache.command("gc")
@click.option("--older-than", default="7d", show_default=True, help="Keep what is younger: 90m, 12h, 7d.")
@click.option("--yes", is_flag=True, help="Delete without asking.")
def cache_gc(older_than: str, yes: bool) -> None:
    """Delete caches that no commit, no working copy and no live claim names."""
    workspace, _ = open_workspace()
    from draftsmith.jobs import gc as job

    found = job.find(workspace, older_than_s=job.parse_age(older_than))
    click.echo(found.text)
    if not found.doomed:
        return
    if not yes:
        click.confirm("Delete them?", abort=True)
    click.echo(job.delete(workspace, found))
