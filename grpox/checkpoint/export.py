"""Export of a checkpoint to a plain Hugging Face folder, without process group or DeepSpeed's engine."""

from __future__ import annotations

import io
import shutil
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path

import torch
from pydantic import ValidationError
from transformers import PreTrainedModel
from transformers.utils import logging

from grpox.checkpoint.folders import FOLDER, MANIFEST, checkpoints_in, read_whole
from grpox.checkpoint.progress import PROGRESS, Progress
from grpox.checkpoint.resume import newest_good
from grpox.checkpoint.save_model import CARD, model_card
from grpox.checkpoint.saver import ENGINE
from grpox.checkpoint.shards import only_weights
from grpox.config import ModelConfig, RunConfig
from grpox.errors import ConfigError
from grpox.policy.adapter_folder import FOLDER as ADAPTER_FOLDER
from grpox.policy.adapter_folder import write_adapter
from grpox.policy.lora.add import add_adapters
from grpox.policy.lora.layers import adapter_parameters, merge_adapters
from grpox.policy.model_folder import save_whole
from grpox.policy.models import load_model, load_tokenizer
from grpox.runfile.model_options import init_problems, runs_code
from grpox.runfile.objects import MERGED
from grpox.runtime.files import write_atomically
from grpox.runtime.world import World


def export_checkpoint(source: Path, out: Path, trusts_code: bool = False) -> Path:
    """Write a checkpoint's model, tokenizer and configs to `out`, whole or not at all; returns the checkpoint.

    Trained adapters are merged into the model and saved in ``adapter/`` besides.

    Args:
        source: a checkpoint, or a run's folder: its newest good checkpoint.
        trusts_code: run code that comes with the model, if the run did.

    Raises:
        ConfigError: there is no good checkpoint, `out` is not empty, the model comes with code, or the run's
            model, which has the rest besides the weights, is gone.
        RunFailed: a reload would not find the whole model.
    """
    logging.disable_progress_bar()
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        what = "is not empty" if out.is_dir() else "is a file"
        raise ConfigError(what, "OUT_DIR", given=str(out), allowed="a new or empty folder")
    checkpoint, progress = _find(source)
    config = _model_config(checkpoint, progress)
    if (code := runs_code(config.init)) and not trusts_code:
        what = f"the checkpoint asks for {', '.join(code)}: that may run code which comes with its model"
        allowed = f"--trust-remote-code, where you trust {config.path}"
        raise ConfigError(what, "CHECKPOINT", given=str(checkpoint), allowed=allowed)
    model, tokenizer = _load(checkpoint, config, config), load_tokenizer(config)
    unfinished = out.with_name(f"{out.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    try:
        if config.lora is not None:
            state = {name: parameter.detach() for name, parameter in adapter_parameters(model)}
            write_adapter(model, state, config.path, unfinished / ADAPTER_FOLDER)
            merge_adapters(model)
        save_whole(model, unfinished)
        tokenizer.save_pretrained(unfinished)
        with suppress(ValidationError):  # a config that this version of grpox cannot read
            run = RunConfig.model_validate(progress.config)
            card = model_card(run, {"steps": progress.step}, progress.data, progress.metrics)
            write_atomically(unfinished / CARD, card)
        unfinished.rename(out)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return checkpoint


def checkpoint_model(checkpoint: Path, base: ModelConfig) -> PreTrainedModel:
    """Load the model of a checkpoint on CPU, adapters merged.

    Args:
        base: the model that the run began with, and how it may be loaded.

    Raises:
        ConfigError: the checkpoint is damaged, or the model that the run began with is gone.
    """
    config = _model_config(*_find(checkpoint))
    model = _load(checkpoint, base, config)
    if config.lora is not None:
        merge_adapters(model)
    return model


def _find(source: Path) -> tuple[Path, Progress]:
    """Return the checkpoint that `source` is or has, whose files all match its manifest."""
    if (source / MANIFEST).exists() or (source / PROGRESS).exists():
        try:
            return source, read_whole(source, Progress.read)
        except ValueError as error:
            raise ConfigError(f"is damaged: {error}", "CHECKPOINT", given=str(source)) from error
    if newest := newest_good(source, World(0, 1, torch.device("cpu"))):
        return newest.folder, newest.progress
    other = "no such folder" if not source.is_dir() else f"is neither a checkpoint nor a run with {FOLDER}"
    what = "holds no good checkpoint" if checkpoints_in(source) else other
    allowed = "a run's folder, or one of its checkpoints"
    if runs := sorted(str(path.parent) for path in source.parent.glob(f"*/{FOLDER}") if path.is_dir()):
        allowed += f", such as {', '.join(runs[:5])}"
    raise ConfigError(what, "CHECKPOINT", given=str(source), allowed=allowed)


def _model_config(checkpoint: Path, progress: Progress) -> ModelConfig:
    section = progress.config.get("model")
    try:
        config = ModelConfig.model_validate(section)
    except ValidationError as error:
        raise ConfigError(f"{checkpoint} names no model", given=str(section)) from error
    if config.lora is not None and MERGED in progress.data:
        what = "the run began with a trained adapter merged into its model, and no file has the merged weights"
        allowed = "model/ of the finished run; or a run whose model is the folder of the merged model"
        raise ConfigError(what, "CHECKPOINT", given=str(checkpoint), allowed=allowed)
    if problems := init_problems(config):
        raise ConfigError(problems)
    path = Path(config.path)
    if path.is_absolute() and not path.is_dir():
        what = "the run's model is gone, which holds the architecture and the tokenizer"
        raise ConfigError(what, "model.path", given=config.path)
    return config


def _load(checkpoint: Path, base: ModelConfig, config: ModelConfig) -> PreTrainedModel:
    """Load `base`, add the adapters of `config`, and load the checkpoint's weights."""
    model = load_model(base)
    if config.lora is not None:
        add_adapters(model, config.lora, seed=0)
    load_weights(model, checkpoint)
    return model


@torch.no_grad()
def load_weights(model: PreTrainedModel, checkpoint: Path) -> None:
    """Replace the weights of `model` with those of a checkpoint; raises ConfigError for another model's."""
    places = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    # A checkpoint of adapters holds only the adapters.
    missing = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    from deepspeed.utils import zero_to_fp32

    with only_weights(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        sharded = zero_to_fp32._get_fp32_state_dict_from_zero_checkpoint(
            str(checkpoint / ENGINE), exclude_frozen_parameters=False
        )
    # Each access reads one float32 weight from disk. Tied weights come under each of their names.
    for name, weight in sharded.items():
        place = places.get(name)
        if place is None or place.shape != weight.shape:
            missing = {name}
            break
        place.copy_(weight.contiguous())
        missing.discard(name)
    if missing:
        what = f"is not the model that {checkpoint} is of: they differ in {min(missing)}"
        raise ConfigError(what, "model.path", given=model.name_or_path)
