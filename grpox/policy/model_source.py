"""Where `model.path` leads: a folder, or the hub, which is asked once before transformers asks many times."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from grpox.config import ModelConfig
from grpox.errors import ConfigError, Problem, text_of

HUB_SECONDS = 10.0
"""How long the hub may take to answer."""


def model_location(config: ModelConfig) -> str:
    """What `from_pretrained` is to load: a folder or hub id.

    Where the hub does not answer but its cache has the model, it is the folder in the cache: given the id,
    transformers would go on asking for a minute, even for local files only.

    Raises:
        ConfigError: the hub has no such model, or does not answer and the cache does not have it either.
    """
    if Path(config.path).is_absolute() or Path(config.path).is_dir():
        return config.path
    init = config.init
    return _ask_hub(config.path, init.get("revision"), init.get("token"), init.get("cache_dir"))


@lru_cache
def _ask_hub(repo: str, revision: str | None, token: str | None, cache_dir: str | None) -> str:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    key = "model.path"
    try:
        HfApi().model_info(repo, revision=revision, timeout=HUB_SECONDS, token=token)
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        what = f"is not a folder here, and the hub refuses it: {_first_line(error)}"
        raise ConfigError(Problem(what, key, given=repo)) from error
    except Exception as error:
        if folder := _cached(repo, revision, cache_dir):
            return folder
        reason = f"{type(error).__name__}: {_first_line(error)}"
        what = f"is not a folder here, and the hub cannot be asked for it: {reason}"
        raise ConfigError(Problem(what, key, given=repo)) from error
    return repo


def _cached(repo: str, revision: str | None, cache_dir: str | None) -> str:
    """The folder of a model that was downloaded before; empty if there is none."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return str(snapshot_download(repo, revision=revision, cache_dir=cache_dir, local_files_only=True))
    except LocalEntryNotFoundError:
        return ""


def _first_line(error: Exception) -> str:
    return next((line for line in text_of(error).strip().splitlines() if line.strip()), "no reason given")
