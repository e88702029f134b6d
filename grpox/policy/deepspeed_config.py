"""DeepSpeed's configuration for a run: grpox's values, and `deepspeed.settings` merged over them."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from grpox.config import RunConfig
from grpox.config.inputs import dtype_on
from grpox.errors import ConfigError, Problem, describe
from grpox.policy.precision import dtype_here
from grpox.runfile.deepspeed_settings import without_auto

REFUSED = "DeepSpeed does not accept this value"


def deepspeed_config(config: RunConfig, world_size: int, gpu: bool | None = None) -> dict[str, Any]:
    """Return the configuration of the policy's engine, as `deepspeed.initialize` accepts it.

    Args:
        gpu: True if ranks have a GPU; default: True if this process has one.
    """
    micro_batch = config.train.per_device_train_batch_size
    gpu = torch.cuda.is_available() if gpu is None else gpu
    own = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": 1,
        "train_batch_size": micro_batch * world_size,
        "gradient_clipping": config.train.max_grad_norm,
        "zero_optimization": _zero_optimization(config, world_size, gpu),
        "zero_allow_untested_optimizer": True,
        # Offloaded states are updated by the run's own optimizer: DeepSpeed's CPUAdam is compiled on first use.
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": dtype_on(config.model.dtype, gpu) == "bfloat16"},
        # Half-precision sums would make the gradient depend on the number of micro-batches.
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "steps_per_print": sys.maxsize,
    }
    return _merged(own, without_auto(config.deepspeed.settings))


def reference_config(config: RunConfig, world_size: int) -> dict[str, Any]:
    """Return the configuration for a model that is never updated."""
    settings = deepspeed_config(config, world_size)
    settings.pop("gradient_clipping")
    zero = settings["zero_optimization"]
    zero.pop("offload_optimizer", None)
    if zero.get("offload_param", {}).get("nvme_path"):
        # DeepSpeed empties its folder at the start, and the policy's shards are in that folder.
        zero["offload_param"]["nvme_path"] += "/reference"
    return settings


def check_deepspeed(config: RunConfig) -> None:
    """Check that DeepSpeed accepts the run's configuration, before a model is loaded.

    Raises:
        ConfigError: a setting has a wrong type or value, or offload to nvme cannot work on this machine.
    """
    import deepspeed

    # DeepSpeed counts the ranks of its own group, which exists if this process has run before.
    joined = deepspeed.comm.is_initialized()
    settings = deepspeed_config(config, deepspeed.comm.get_world_size() if joined else 1)
    try:
        deepspeed.DeepSpeedConfig(copy.deepcopy(settings))
    except ValidationError as error:
        reasons = [f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}" for detail in error.errors()]
        raise ConfigError(
            [Problem(f"{REFUSED}: {reason}", "deepspeed.settings") for reason in reasons]
        ) from error
    except Exception as error:
        raise ConfigError(f"{REFUSED}: {describe(error)}", "deepspeed.settings") from error
    if config.deepspeed.nvme_path:
        _check_nvme(config, config.deepspeed.nvme_path)


AT_A_TIME_ON_CPU = 2**24
"""Number of gradients that are summed over the ranks, or given to the optimizer, at a time on a CPU: larger
buckets only take memory there, and fresh memory takes time."""


def _zero_optimization(run: RunConfig, world_size: int, gpu: bool) -> dict[str, Any]:
    config = run.deepspeed
    zero: dict[str, Any] = {"stage": config.stage}
    if not gpu:
        # gloo always sums a whole bucket. To scatter it, DeepSpeed and gloo would each make a copy of it.
        zero |= {"reduce_bucket_size": AT_A_TIME_ON_CPU, "reduce_scatter": False}
        if not run.train.optimizer:
            # DeepSpeed calls the optimizer once per part. AdamW changes each weight by itself; others may not.
            zero["sub_group_size"] = AT_A_TIME_ON_CPU
    if world_size == 1 and config.offload_param == "none":
        # With one rank the shard is the whole weight: releasing it frees nothing and costs time.
        zero["stage3_param_persistence_threshold"] = sys.maxsize
    if config.stage3_param_persistence_threshold is not None:
        zero["stage3_param_persistence_threshold"] = config.stage3_param_persistence_threshold
    for key in ("offload_optimizer", "offload_param"):
        device = getattr(config, key)
        if device != "none":
            zero[key] = {"device": device}
        if device == "nvme":
            zero[key]["nvme_path"] = str(Path(config.nvme_path or "").expanduser().absolute())
    if config.offload_param == "nvme":
        # Each parameter that stays in memory uses one of a few buffers: DeepSpeed's defaults run out of them.
        for name in ("max_live_parameters", "max_reuse_distance", "prefetch_bucket_size"):
            zero[f"stage3_{name}"] = 0
    return zero


def _merged(own: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `given` over `own`, key by key at every depth."""
    merged = dict(own)
    for name, value in given.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(name), dict)
        merged[name] = _merged(merged[name], value) if both else copy.deepcopy(value)
    return merged


def _check_nvme(config: RunConfig, folder: str) -> None:
    from deepspeed.accelerator import get_accelerator

    if (
        config.deepspeed.offload_param == "nvme"
        and dtype_here(config.model) == "float32"
        and not get_accelerator().is_fp16_supported()
    ):
        # partition_parameters.Init._set_dtype swaps in bfloat16 there, whatever the model's dtype is.
        what = "on this machine DeepSpeed can store parameters on nvme only in bfloat16"
        raise ConfigError(what, "deepspeed.offload_param", given="nvme", allowed="cpu, or model.dtype bfloat16")
    builder = get_accelerator().create_op_builder("AsyncIOBuilder")
    if not builder.is_compatible(verbose=False):
        what = "DeepSpeed cannot offload to nvme here: its op async_io needs libaio with headers (libaio-dev)"
        raise ConfigError(what, "deepspeed.nvme_path", given=folder, allowed="offload to cpu")
    try:
        Path(folder).expanduser().mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = f"the folder cannot be created: {error.strerror}"
        raise ConfigError(what, "deepspeed.nvme_path", given=folder) from error
