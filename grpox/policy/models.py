"""Loads the policy and its tokenizer from a Hugging Face folder or the hub, and builds copies of the model.

The hub is asked only once for a path, whereas transformers would ask many times.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.quantizers.auto import AutoQuantizationConfig
from transformers.utils import GENERATION_CONFIG_NAME

from grpox.config import ModelConfig
from grpox.errors import ConfigError, Problem, plain, text_of
from grpox.errors.formatting import some
from grpox.policy.attention import VARLEN
from grpox.policy.float32_head import cast_head, has_float32_head
from grpox.policy.model_folder import undescribed
from grpox.policy.precision import dtype_here
from grpox.policy.randomness import disable_dropout
from grpox.policy.rope import fix_rope
from grpox.runfile.model_options import quantization_of, quantization_problems
from grpox.runtime import launch
from grpox.runtime.logs import get_logger

SIZES = ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size")
"""Sizes in a model's configuration that transformers accepts even if they are below 1."""
OTHER_PARTS = re.compile(r"(^|\.)((vision|visual|image|audio|speech)(_\w+)?|(multi_modal|mm)_projector)\.")
"""Words in the names of weights that belong to image or sound towers and their projections to text."""
NO_CODE = {"trust_remote_code": False}
"""Default of trust_remote_code; without it transformers would ask in the terminal."""


def load_model(config: ModelConfig, trains: bool = False) -> PreTrainedModel:
    """Load the model with its weights, on CPU, in the dtype of the config.

    Args:
        trains: True if the model is trained and saved: then the checkpoint must have no unused parts, because
            a save would lose them.

    Raises:
        ConfigError: transformers cannot load a model from there, or the checkpoint lacks weights or has them in
            other shapes: transformers would draw such weights at random and only warn.
    """
    path = model_location(config)
    loaded = load_config(config)  # refuses code, which transformers would fetch for the model
    method = quantization_of(loaded.to_dict())
    try:
        if (Path(path) / GENERATION_CONFIG_NAME).is_file():
            GenerationConfig.from_pretrained(path)  # transformers would ignore one that cannot be read
        with _without_load_report():
            model, info = AutoModelForCausalLM.from_pretrained(
                path,
                dtype=getattr(torch, dtype_here(config)),
                output_loading_info=True,
                # Otherwise transformers raises an error without a name; they are refused below.
                ignore_mismatched_sizes=True,
                **NO_CODE | config.init | _widening(loaded),
            )
            if method:
                model = _widened(model, getattr(torch, dtype_here(config)))
    except Exception as error:
        raise _unloadable("model", config, error) from error
    if trains and getattr(model, "_hf_peft_config_loaded", False):  # loaded by transformers
        what = "the folder contains an adapter beside the model, but training cannot start from an adapter"
        allowed = "a folder with only the model, or with the adapter merged into it"
        raise ConfigError(what, "model.path", given=config.path, allowed=allowed)
    _check_weights(info, config.path, trains)
    if what := undescribed(model):
        raise ConfigError(
            what, "model.path", given=config.path, allowed="a config.json that describes its weights"
        )
    if method and launch.rank() == 0:
        get_logger(__name__).info("weights of %s are widened to %s", method, dtype_here(config))
    _check_stop_tokens(model, config.path)
    if config.cast_lm_head_to_fp32:
        cast_head(model)
    fix_rope(model, config.longest_sequence)
    return model


def _widening(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the argument of `from_pretrained` that widens weights while they load, if there is one."""
    given = getattr(config, "quantization_config", None)
    parsed = AutoQuantizationConfig.from_dict(given | {"dequantize": True}) if isinstance(given, dict) else None
    return {"quantization_config": parsed} if hasattr(parsed, "dequantize") else {}


def _widened(model: Any, dtype: torch.dtype) -> PreTrainedModel:
    """Return a plain model with the weights of a quantised one."""
    if getattr(model, "is_quantized", False):  # by a method that widens weights after loading
        model = model.dequantize(dtype)
    vars(model).pop("_weight_conversions", None)  # a save would quantise the model by them
    if undescribed(model):  # compressed-tensors leaves its scales
        plain = architecture_of(model)()
        if lost := plain.load_state_dict(model.state_dict(), strict=False).missing_keys:
            raise ValueError(f"no weights for {some(lost)} after widening")
        plain.generation_config, model = model.generation_config, plain
    widened: PreTrainedModel = model.to(dtype)
    return widened


def load_config(config: ModelConfig) -> PreTrainedConfig:
    """Load the model's configuration, without its weights.

    Raises:
        ConfigError: transformers cannot load it, or it asks for code that the run file does not allow.
    """
    path = model_location(config)
    try:
        loaded: PreTrainedConfig = AutoConfig.from_pretrained(path, **NO_CODE | config.init)
    except Exception as error:
        raise _unloadable("configuration", config, error) from error
    if problems := list(quantization_problems(quantization_of(loaded.to_dict()), config)):
        raise ConfigError(problems)
    own = str(config.init.get("attn_implementation"))
    if kernels := [name for name in hub_kernels(loaded) if name not in own]:
        what = f"its config.json asks for code from a hub: the kernel {kernels[0]}"
        allowed = "a config.json without the kernel, or the same kernel in the run file"
        raise ConfigError(what, "model.init.attn_implementation", given=config.path, allowed=allowed)
    for name in SIZES:
        size = getattr(loaded.get_text_config(), name, None)
        if isinstance(size, int) and size < 1:
            what = f"its config.json has {name} {size}"
            raise ConfigError(what, "model.path", given=config.path, allowed="1 or more")
    return loaded


def hub_kernels(config: PreTrainedConfig) -> list[str]:
    """Return the attention kernels that a model's configuration asks for; they are code from a hub."""
    parts = [config, *(getattr(config, name, None) for name in config.sub_configs)]
    names = [str(getattr(part, "_attn_implementation", None)) for part in parts]
    return [name for name in names if "/" in name]


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer; without a padding token, EOS is used (masks, not ids, mark padding).

    Raises:
        ConfigError: the folder has no tokenizer that transformers can load.
    """
    shared = ("revision", "trust_remote_code", "token", "cache_dir", "subfolder", "local_files_only")
    init = NO_CODE | {name: config.init[name] for name in shared if name in config.init}
    path = model_location(config)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **init)
    except Exception as error:
        raise _unloadable("tokenizer", config, error) from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token_id is None:
        what = "its tokenizer has neither a padding nor an EOS token"
        raise ConfigError(what, key="model.path", given=config.path)
    return tokenizer


def architecture_of(model: PreTrainedModel) -> Callable[[], PreTrainedModel]:
    """Return a builder of plain models like `model`: not sharded, with random weights and their own config.

    Their logits are float32 if the logits of `model` are.
    """
    config, dtype = model.config, model.dtype
    casts = has_float32_head(model) and dtype != torch.float32
    # Code that came with the checkpoint was trusted when `model` was loaded.
    trusted = type(model).__module__.startswith("transformers_modules")

    def build() -> PreTrainedModel:
        # Initialisation cannot be left out: it also fills the buffers and ties the embeddings.
        with torch.random.fork_rng(devices=[]):
            own = copy.deepcopy(config)
            if own._attn_implementation == VARLEN:  # it gains nothing if each sequence has its own row
                own._attn_implementation = "sdpa"
            built = AutoModelForCausalLM.from_config(own, dtype=dtype, trust_remote_code=trusted)
        disable_dropout(built)  # some models apply it in eval mode too
        if casts:
            cast_head(built)
        return built

    return build


def stop_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the tokens that end a completion: the tokenizer's EOS, and the generation config's EOS tokens."""
    ids = (tokenizer.eos_token_id, *_stop_tokens(model))
    return tuple(dict.fromkeys(token for token in ids if token is not None))


def _stop_tokens(model: PreTrainedModel) -> list[Any]:
    """List the EOS tokens of the generation config, whose type is not checked."""
    ids: Any = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    return ids if isinstance(ids, list) else [] if ids is None else [ids]


def vocabulary_of(model: PreTrainedConfig) -> int | None:
    """Return the model's vocabulary size; None if its configuration has none."""
    size = getattr(model.get_text_config(), "vocab_size", None)
    return size if isinstance(size, int) else None


def check_special_tokens(tokenizer: PreTrainedTokenizerBase, model: PreTrainedConfig, path: str) -> None:
    """Refuse a tokenizer with tokens beyond the model's embeddings.

    Raises:
        ConfigError: a token was added to the tokenizer, but the model was not resized.
    """
    special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    used = f"{tokenizer.chat_template} {tokenizer.pad_token} {tokenizer.eos_token}"
    size, vocabulary = vocabulary_of(model), tokenizer.get_vocab()
    beyond = [name for name, number in vocabulary.items() if size is not None and number >= size]
    # A special token that the template never writes is in no text; a prompt that contains it is refused later.
    if named := [f"{name} {vocabulary[name]}" for name in beyond if name not in special or name in used]:
        what = f"its tokenizer has tokens beyond the model's embeddings, {len(named)} in all: {some(named)}"
        raise ConfigError(
            what, "model.path", given=path, allowed=f"tokens below {size}, the model's vocabulary"
        )


def _check_stop_tokens(model: PreTrainedModel, path: str) -> None:
    """Refuse EOS tokens of the generation config that the model does not have."""
    vocabulary = vocabulary_of(model.config)
    for token in _stop_tokens(model):
        if not isinstance(token, int) or (vocabulary is not None and not 0 <= token < vocabulary):
            what = f"{GENERATION_CONFIG_NAME} has an eos_token_id that the model does not have"
            allowed = "integers from 0" + (f" to {vocabulary - 1}" if vocabulary is not None else "")
            raise ConfigError(what, "model.path", given=f"{path}, token {token!r}", allowed=allowed)


def _check_weights(info: dict[str, Any], path: str, trains: bool) -> None:
    """Refuse a checkpoint that lacks weights of the model; tied weights may be stored once."""
    problems = []
    if missing := sorted(info["missing_keys"]):
        problems.append(f"weights missing in the checkpoint, {len(missing)} in all: {some(missing)}")
    if mismatched := sorted(info["mismatched_keys"]):
        shapes = [f"{name} is {list(there)}, not {list(here)}" for name, there, here in mismatched]
        problems.append(f"weights with another shape, {len(shapes)} in all: {some(shapes)}")
    unused = sorted(info["unexpected_keys"])
    if trains and (towers := [name for name in unused if OTHER_PARTS.search(name)]):
        what = "parts that are not for text; its config.json does not use them, and a save would lose them"
        problems.append(f"{what}, {len(towers)} weights in all: {some(towers)}")
    if problems:
        raise ConfigError([Problem(what, key="model.path", given=path) for what in problems])
    if unused and launch.rank() == 0:
        what = f"weights that its config.json does not use, {len(unused)} in all: {some(unused)}"
        get_logger(__name__).warning("%s", plain(f"{path} has {what}"))


@contextmanager
def _without_load_report() -> Iterator[None]:
    """Suppress transformers' coloured table of wrong weights, because grpox reports them itself."""
    logger = logging.getLogger("transformers.modeling_utils")

    def is_other(record: logging.LogRecord) -> bool:
        return "LOAD REPORT" not in record.getMessage()

    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)


def _unloadable(what: str, config: ModelConfig, error: Exception) -> ConfigError:
    reason = " ".join(text_of(error).split()) or "no reason given"
    message = f"its {what} cannot be loaded: {type(error).__name__}: {reason}"
    if "trust_remote_code" in reason:
        what = f"its {what} comes with its own code, which grpox runs only if the run file allows it"
        return ConfigError(what, "model.init.trust_remote_code", given=config.path)
    attention = config.init.get("attn_implementation")
    if attention is not None and "ttention" in message:
        return ConfigError(message, key="model.init.attn_implementation", given=str(attention))
    if isinstance(error, TypeError) and config.init:
        return ConfigError(message, key="model.init", given=", ".join(config.init))
    return ConfigError(message, key="model.path", given=config.path)


HUB_SECONDS = 10.0
"""Seconds that the hub may take to answer."""


def model_location(config: ModelConfig) -> str:
    """Return the argument of `from_pretrained`: a folder or hub id.

    If the hub does not answer but the cache has the model, the result is the folder in the cache: with the id,
    transformers would ask the hub for a minute, even for local files only.

    Raises:
        ConfigError: the hub has no such model, or does not answer and the cache lacks the model too.
    """
    if Path(config.path).is_absolute() or Path(config.path).is_dir():
        return config.path
    init = config.init
    return _ask_hub(config.path, init.get("revision"), init.get("token"), init.get("cache_dir"))


@lru_cache
def _ask_hub(repo: str, revision: str | None, token: str | None, cache_dir: str | None) -> str:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import (
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    key = "model.path"
    try:
        HfApi().model_info(repo, revision=revision, timeout=HUB_SECONDS, token=token)
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        what = f"is not a local folder, and the hub refuses it: {_first_line(error)}"
        raise ConfigError(what, key, given=repo) from error
    except Exception as error:  # noqa: BLE001 - whatever a client of HTTP raises
        try:
            return snapshot_download(repo, revision=revision, cache_dir=cache_dir, local_files_only=True)
        except LocalEntryNotFoundError:
            reason = f"{type(error).__name__}: {_first_line(error)}"
            what = f"is not a local folder, and the hub cannot be reached: {reason}"
            raise ConfigError(what, key, given=repo) from error
    return repo


def _first_line(error: Exception) -> str:
    return next((line for line in text_of(error).strip().splitlines() if line.strip()), "no reason given")
