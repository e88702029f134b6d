"""Tells runs what this server is: ASGI middleware that answers GET /grpox/about."""

from __future__ import annotations

import json
import os
from importlib import metadata
from typing import Any

from grpox_vllm_serving.guard import App, Receive, Scope, Send
from grpox_vllm_serving.signature import signature

PATH = "/grpox/about"
PROTOCOL = 1
"""Raised when what a run and a server say to one another changes: they may be of different grpox versions."""
INSTANCE = "GRPOX_SERVER_INSTANCE"
"""A name that no other start of a server has; also in the file `INSTANCE_FILE` of its weights folder."""
INSTANCE_FILE = "instance"
WEIGHTS_FOLDER = "GRPOX_SERVER_WEIGHTS_FOLDER"


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
