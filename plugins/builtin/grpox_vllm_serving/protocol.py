"""Agreement between a vLLM server and its runs: the secret token, and the server's description of itself.

vLLM's own ``--api-key`` does not protect the routes that replace weights and call methods of the workers. Two
ASGI middlewares wrap the server: `TokenGuard`, the outermost, protects every path but /health; `About` adds the
description.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import stat
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from importlib import metadata
from pathlib import Path
from typing import Any

from grpox.errors import ConfigError
from grpox.toolkit import rope_choice

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

TOKEN_VARIABLE = "GRPOX_SERVER_TOKEN"
SHORTEST = 16
"""Smallest number of characters of a token: it protects routes that replace a model's weights."""
LONGEST = 16 << 10
"""Largest number of characters of a token: the servers refuse longer headers."""
OPEN_PATH = "/health"
MOST_HEADERS = 17 << 10
"""Largest size of a request's headers in bytes: 16 KiB, such as a proxy's long token, plus the headers that
every client adds.

The server's own limit is 4 MiB or none, depending on the installed parser.
"""

ABOUT_PATH = "/grpox/about"
PROTOCOL = 1
"""Version of the protocol. A change of the messages between run and server increases it, because the two may
have different grpox versions."""
INSTANCE = "GRPOX_SERVER_INSTANCE"
"""Environment variable with the unique name of a server's start, which is also in the file `INSTANCE_FILE` of
its weights folder."""
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
    "rope_factors",
)
"""Keys of a transformers configuration that must agree, and the name of its position factors. A checkpoint may
differ, because the weights are sent."""

FLOAT32_HEAD = ("--hf-overrides", '{"head_dtype": "float32"}')
"""Arguments of vLLM's server for `model.cast_lm_head_to_fp32`; later ones of the user replace them."""


def default_file() -> Path:
    """Return the file in which a server stores its token for runs of the same user on the same machine."""
    home = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(home).expanduser() / "grpox" / "server-token"


def read_token(file: str | None, key: str, serve: str = "grpox serve MODEL") -> str:
    """Return the token from `file` if given, else from the environment, else from the default file.

    Args:
        key: key of the run file or option that sets `file`, for messages.
        serve: command that starts a server here, and makes the default file.

    Raises:
        ConfigError: there is no token, others may read the file, or the token is too short or cannot be sent.
    """
    if file is None and TOKEN_VARIABLE in os.environ:
        return _checked(os.environ[TOKEN_VARIABLE], TOKEN_VARIABLE)
    path = Path(file).expanduser() if file is not None else default_file()
    try:
        mode, text = path.stat().st_mode, path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        what = f"no token for the vLLM server: {' '.join(str(error).split())}"
        allowed = f"a file with the servers' token, or the token in {TOKEN_VARIABLE}"
        if file is None and isinstance(error, FileNotFoundError):
            what, allowed = (
                "no token, as no vLLM server was started on this machine",
                f"after: {serve}; or {allowed}",
            )
        raise ConfigError(what, key, given=str(path), allowed=allowed) from error
    if stat.S_IMODE(mode) & 0o077:
        what = "other users can read the token"
        raise ConfigError(what, key, given=str(path), allowed=f"chmod 600 {path}")
    return _checked(text, str(path))


def read_or_make_token(file: str | None) -> str:
    """Return the token as `read_token` does, but write a new one to the default file if there is none."""
    path = default_file()
    if file is None and TOKEN_VARIABLE not in os.environ:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as new:
                new.write(secrets.token_urlsafe(32) + "\n")
        except FileExistsError:  # from an earlier server
            pass
        except OSError as error:
            what = f"a token for the vLLM server cannot be saved: {error.strerror or error}"
            allowed = f"--token-file, or the token in {TOKEN_VARIABLE}"
            raise ConfigError(what, "--token-file", given=str(path), allowed=allowed) from error
    return read_token(file, "--token-file")


def _checked(text: str, where: str) -> str:
    token = text.strip()
    fits = SHORTEST <= len(token) <= LONGEST
    if not fits or not token.isascii() or not token.isprintable() or " " in token:
        what = f"the token for the vLLM server is invalid: it has {len(token)} characters"
        allowed = f"{SHORTEST} to {LONGEST:,} printable ASCII characters without blanks"
        raise ConfigError(what, where, allowed=allowed)
    return token


class TokenGuard:
    """Requires ``Authorization: Bearer TOKEN``; the server's process has the token in its environment."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._expected = f"Bearer {os.environ[TOKEN_VARIABLE]}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = scope["headers"] if scope["type"] == "http" else ()
        if sum(len(name) + len(value) for name, value in headers) > MOST_HEADERS:
            await _answer(send, 431, {"error": f"the headers are longer than {MOST_HEADERS} bytes"})
        elif scope["type"] == "lifespan" or self._may_pass(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "wrong or missing token"})
        else:
            wrong = {"error": "wrong or missing token"}
            await _answer(send, 401, wrong, (b"www-authenticate", b"Bearer"))

    def _may_pass(self, scope: Scope) -> bool:
        if scope["type"] == "http" and scope["path"] == OPEN_PATH and scope["method"] in ("GET", "HEAD"):
            return True
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self._expected)


async def _answer(send: Send, status: int, content: Any, *more: tuple[bytes, bytes]) -> None:
    body = json.dumps(content).encode()
    length = str(len(body)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", length), *more]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class About:
    """Answers its own path with a description of this server, which runs compare with themselves; passes on all
    others."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != ABOUT_PATH:
            return await self._app(scope, receive, send)
        return await _answer(send, 200, await describe(scope["app"].state.engine_client))


async def describe(engine_client: Any) -> dict[str, Any]:
    """Return the facts about this server that a run needs."""
    config = engine_client.vllm_config
    return {
        "protocol": PROTOCOL,
        "grpox": metadata.version("grpox"),
        "instance": os.environ[INSTANCE],
        "model": config.model_config.model,
        "signature": signature(config.model_config.hf_config, config.model_config.max_model_len),
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "head_dtype": str(config.model_config.head_dtype).removeprefix("torch."),
        "max_model_len": config.model_config.max_model_len,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "world_size": config.parallel_config.world_size_across_dp,
        "transfer": config.weight_transfer_config.backend,
        "weights_folder": os.environ[WEIGHTS_FOLDER],
        "weight_version": await engine_client.get_weight_version(),
    }


def signature(config: Any, longest: int | None = None) -> dict[str, Any]:
    """Return the values of `SHAPE` that a transformers configuration has, in an engine for `longest` tokens."""
    values = config.get_text_config().to_dict() | {"rope_factors": rope_choice(config, longest) or None}
    return {name: values[name] for name in SHAPE if values.get(name) is not None}


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Return one line for each value that both have and that differs."""
    return [
        f"{name} is {theirs[name]} there and {ours[name]} here"
        for name in SHAPE
        if name in ours and name in theirs and ours[name] != theirs[name]
    ]
