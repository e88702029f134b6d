"""Tells runs what this server is, which they compare with themselves: ASGI middleware for GET /grpox/about."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from grpox_vllm_serving.guard import App, Receive, Scope, Send

PATH = "/grpox/about"
PROTOCOL = 1
"""Raised when what a run and a server say to one another changes: they may be of different grpox versions."""
INSTANCE = "GRPOX_SERVER_INSTANCE"
"""A name that no other start of a server has; also in the file `INSTANCE_FILE` of its weights folder."""
INSTANCE_FILE = "instance"
WEIGHTS_FOLDER = "GRPOX_SERVER_WEIGHTS_FOLDER"

SHAPE = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "tie_word_embeddings",
)
"""Keys of a transformers configuration. The weights themselves are sent, so that a checkpoint may differ."""


class About:
    """Passes on everything but its own path."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != PATH:
            return await self._app(scope, receive, send)
        body = json.dumps(await describe(scope["app"].state.engine_client)).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        return await send({"type": "http.response.body", "body": body})


async def describe(engine_client: Any) -> dict[str, Any]:
    """What a run has to know of this server."""
    config = engine_client.vllm_config
    return {
        "protocol": PROTOCOL,
        "grpox": metadata.version("grpox"),
        "instance": os.environ[INSTANCE],
        "model": config.model_config.model,
        "signature": signature(config.model_config.hf_config),
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "max_model_len": config.model_config.max_model_len,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "world_size": config.parallel_config.world_size_across_dp,
        "transfer": config.weight_transfer_config.backend,
        "weights_folder": os.environ[WEIGHTS_FOLDER],
        "weight_version": await engine_client.get_weight_version(),
    }


def signature(config: Any) -> dict[str, Any]:
    """The values of `SHAPE` that a transformers configuration has."""
    values = config.get_text_config().to_dict()
    return {name: values[name] for name in SHAPE if values.get(name) is not None}


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """One line for each value that both have and that differs."""
    return [
        f"{name} is {theirs[name]} there and {ours[name]} here"
        for name in SHAPE
        if name in ours and name in theirs and ours[name] != theirs[name]
    ]
