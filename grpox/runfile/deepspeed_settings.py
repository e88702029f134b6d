"""Whether `deepspeed.settings` and the offload keys of a run file fit together, without importing DeepSpeed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from grpox.config import DeepSpeedConfig
from grpox.errors import Problem, nearest

OWNED = {
    "train_batch_size": "train.per_device_train_batch_size",
    "train_micro_batch_size_per_gpu": "train.per_device_train_batch_size",
    "gradient_accumulation_steps": "train.gradient_accumulation_steps",
    "gradient_clipping": "train.max_grad_norm",
    "optimizer": "train.optim, or a plugin in train.optimizer",
    "scheduler": "train.lr_scheduler_type, or a plugin in train.scheduler",
    "bf16.enabled": "model.dtype",
    "bfloat16": "model.dtype",
    "torch_autocast": "model.dtype",
    "activation_checkpointing": "train.gradient_checkpointing",
    "zero_optimization.stage": "deepspeed.stage",
    "zero_optimization.stage3_param_persistence_threshold": "deepspeed.stage3_param_persistence_threshold",
    "zero_optimization.param_persistence_threshold": "deepspeed.stage3_param_persistence_threshold",
    "zero_optimization.cpu_offload": "deepspeed.offload_optimizer",
    "zero_optimization.cpu_offload_param": "deepspeed.offload_param",
    "zero_optimization.offload_optimizer.device": "deepspeed.offload_optimizer",
    "zero_optimization.offload_optimizer.nvme_path": "deepspeed.nvme_path",
    "zero_optimization.offload_param.device": "deepspeed.offload_param",
    "zero_optimization.offload_param.nvme_path": "deepspeed.nvme_path",
}
"""What grpox sets itself, and the key of the run file that says how."""

UNSUPPORTED = {
    "fp16.enabled": "loss scaling is not supported: use model.dtype bfloat16, which needs none",
    "gradient_allreduce_op": "the gradient would no longer be that of the loss",
    "gradient_predivide_factor": "the gradient would no longer be that of the loss",
    "prescale_gradients": "ZeRO-3 does not take it",
    "managed_gradient_accumulation": "grpox itself says where a step ends",
    "data_efficiency": "grpox has data and batches of its own",
    "autotuning": "grpox has batches of its own",
    "hybrid_engine": "generators sample",
    "pipeline": "ranks hold shards of the whole model",
    "tensor_parallel": "ranks hold shards of the whole model",
    "sequence_parallel_size": "every rank has micro-batches of its own",
    "expert_parallel": "ranks hold shards of the whole model",
    "weight_quantization": "the policy is trained in model.dtype",
    "zero_optimization.zenflow": "it updates with gradients of earlier steps",
    "zero_optimization.offload_optimizer.super_offload": "it needs an optimizer of DeepSpeed's",
}
"""What would not work here, and why."""

PASSED = {
    "aio", "bf16", "checkpoint", "comet", "comms_logger", "communication_data_type", "compile", "csv_monitor",
    "data_types", "dataloader_drop_last", "datastates_ckpt", "disable_allgather", "disable_python_gc",
    "dump_state", "flops_profiler", "fp16", "log_level", "memory_breakdown",
    "seq_parallel_communication_data_type", "steps_per_print", "tensorboard", "timers",
    "use_data_before_expert_parallelism", "vocabulary_size", "wall_clock_breakdown", "wandb",
    "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "zero_optimization",
}  # fmt: skip
"""Top-level keys that reach DeepSpeed. With those above all that DeepSpeed reads; a test compares them."""

ZERO_KEYS = {
    "stage", "contiguous_gradients", "reduce_scatter", "reduce_bucket_size",
    "use_multi_rank_bucket_allreduce", "allgather_partitions", "allgather_bucket_size", "overlap_comm",
    "compute_grad_norm", "load_from_fp32_weights", "elastic_checkpoint", "offload_param", "offload_optimizer",
    "zenflow", "sub_group_size", "cpu_offload_param", "cpu_offload_use_pin_memory", "cpu_offload",
    "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "stage3_model_persistence_threshold",
    "stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_gather_16bit_weights_on_model_save",
    "stage3_module_granularity_threshold", "stage3_use_all_reduce_for_fetch_params",
    "stage3_allgather_sequential", "stage3_gather_fp16_weights_on_model_save", "ignore_unused_parameters",
    "legacy_stage1", "round_robin_gradients", "parameter_alignment", "zero_hpz_partition_size",
    "zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients",
    "memory_efficient_linear", "pipeline_loading_checkpoint", "override_module_apply",
    "log_trace_cache_warnings", "enable_sanity_checks", "save_muon_momentum_buffer_in_memory", "leaf_module",
}  # fmt: skip
"""Keys of `zero_optimization`; a test compares them with DeepSpeed's."""

_SECTIONS = ("zero_optimization", "bf16", "fp16", "data_types")
_KEY = "deepspeed.settings"


def deepspeed_problems(config: DeepSpeedConfig) -> list[Problem]:
    """What is wrong with offload and settings, as far as it shows without DeepSpeed."""
    return [*_offload_problems(config), *_settings_problems(without_auto(config.settings), config)]


def without_auto(settings: Mapping[str, Any]) -> dict[str, Any]:
    """`settings` without values ``auto``, by which files for transformers say "as the trainer has it"."""
    return {
        name: without_auto(value) if isinstance(value, Mapping) else value
        for name, value in settings.items()
        if value != "auto"
    }


def _offload_problems(config: DeepSpeedConfig) -> Iterator[Problem]:
    users = [key for key in ("offload_optimizer", "offload_param") if getattr(config, key) == "nvme"]
    if users and not config.nvme_path:
        what = f"a folder is required: {users[0]} is nvme"
        yield Problem(what, "deepspeed.nvme_path", allowed="a folder on a fast local disk")
    if config.nvme_path and not users:
        what = "is used by nothing: offload_optimizer and offload_param are not nvme"
        yield Problem(what, "deepspeed.nvme_path", given=config.nvme_path)


def _settings_problems(settings: Mapping[str, Any], config: DeepSpeedConfig) -> Iterator[Problem]:
    for name in settings:
        if name not in PASSED and name not in OWNED and name not in UNSUPPORTED:
            near = nearest(name, PASSED)
            yield Problem("DeepSpeed has no such key", f"{_KEY}.{name}", nearest=near)
    for name in _SECTIONS:
        if name in settings and not isinstance(settings[name], Mapping):
            yield Problem("a mapping is expected", f"{_KEY}.{name}", given=repr(settings[name]))
    zero = settings.get("zero_optimization")
    for name in zero if isinstance(zero, Mapping) else ():
        if name not in ZERO_KEYS:
            near = nearest(name, ZERO_KEYS)
            yield Problem("DeepSpeed has no such key", f"{_KEY}.zero_optimization.{name}", nearest=near)
    # A file that says what the run says anyway need not be edited.
    same = {
        "fp16.enabled": False,
        "zero_optimization.stage": config.stage,
        "zero_optimization.offload_optimizer.device": config.offload_optimizer,
        "zero_optimization.offload_param.device": config.offload_param,
    }
    for key, value in _values(settings):
        if key in same and value == same[key]:
            continue
        if key in OWNED:
            yield Problem(f"grpox sets this: use {OWNED[key]}", f"{_KEY}.{key}", given=_short(value))
        if key in UNSUPPORTED:
            yield Problem(UNSUPPORTED[key], f"{_KEY}.{key}", given=_short(value))


def _values(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every key at every depth."""
    for name, value in settings.items():
        yield prefix + name, value
        if isinstance(value, Mapping):
            yield from _values(value, f"{prefix}{name}.")


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."
