"""A Prefect plugin: `prefect deployment run train-drafter` means `train-drafter/train-drafter`.

Prefect loads it through the entry point `prefect.plugins` wherever `[tool.prefect.plugins]` enables plugins; nothing
else imports it, and it is the one module of the package that knows Prefect.
"""

from __future__ import annotations

import functools
from typing import Any

import httpx
from prefect.plugins import register_hook


def full_name(name: str) -> str:
    """`name` itself if it has a flow part, else the deployment that is named like its flow."""
    return name if "/" in name else f"{name}/{name}"


@register_hook
def setup_environment(*, ctx: Any) -> None:
    """Let the client look up a bare name under its full one. Called once a process, when Prefect is imported.

    Only a bare name also gets one line instead of a traceback if no server answers; all else is Prefect's own.
    """
    from prefect.client.orchestration._deployments.client import DeploymentAsyncClient

    original = DeploymentAsyncClient.read_deployment_by_name

    @functools.wraps(original)
    async def read_deployment_by_name(self: DeploymentAsyncClient, name: str) -> Any:
        if "/" in name:
            return await original(self, name)
        try:
            return await original(self, full_name(name))
        except httpx.ConnectError:
            raise SystemExit(f"no Prefect server answers at {ctx.api_url}: `make up`, or set PREFECT_API_URL") from None

    DeploymentAsyncClient.read_deployment_by_name = read_deployment_by_name  # type: ignore[method-assign]
