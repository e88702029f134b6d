"""The fields that GRPOConfig inherits from transformers' TrainingArguments, and those of earlier versions."""

from __future__ import annotations

from grpox.runfile.from_trl.field import TrlField, copied, differs, same, unneeded, unsupported

_LOADER = unneeded("prompts are tokenised once, and no worker loads them")
_RANKS = unneeded("DeepSpeed ZeRO-3 joins the ranks")
_SPEED = unneeded("changes speed or memory only; what grpox does is in docs/speed.md")
_LINES = unneeded("every step is a line of metrics.jsonl")
_HELD_OUT = unneeded("an evaluation scores completions, nothing else")
_TRACKIO = unneeded("runs are tracked by MLflow, or by an observer plugin")
_FLAG = unneeded("a flag of transformers' example scripts")

TRAINER_FIELDS: dict[str, TrlField] = {
    "output_dir": copied("output_dir"),
    "per_device_train_batch_size": copied("train.per_device_train_batch_size", 8),
    "num_train_epochs": copied("train.num_train_epochs", 3.0, "the same; grpox's default is 1"),
    "max_steps": copied("train.max_steps", -1),
    "learning_rate": copied("train.learning_rate", 1e-6),
    "lr_scheduler_type": copied("train.lr_scheduler_type", "linear"),
    "lr_scheduler_kwargs": copied("train.lr_scheduler_kwargs"),
    "warmup_steps": same("train.warmup_steps", 0, "the same; less than 1 is `warmup_ratio`"),
    "warmup_ratio": copied("train.warmup_ratio", 0.0),
    "optim": same("train.optim", "adamw_torch_fused", "AdamW of PyTorch; others are components"),
    "optim_args": unsupported(
        "parameters of an optimizer component, in `train.optimizer`", None, "train.optimizer"
    ),
    "optim_target_modules": unsupported("all weights are trained by one optimizer"),
    "weight_decay": copied("train.weight_decay", 0.0),
    "adam_beta1": copied("train.adam_beta1", 0.9),
    "adam_beta2": copied("train.adam_beta2", 0.999),
    "adam_epsilon": copied("train.adam_epsilon", 1e-8),
    "gradient_accumulation_steps": copied("train.gradient_accumulation_steps", 1),
    "average_tokens_across_devices": unneeded("losses are always averaged over all ranks", True),
    "max_grad_norm": copied("train.max_grad_norm", 1.0),
    "label_smoothing_factor": unneeded("GRPO has no labels", 0.0),
    "bf16": differs(
        "model.dtype",
        "`bfloat16`, weights too, as DeepSpeed does in TRL; optimizer states are float32. TRL's default",
    ),
    "fp16": unsupported("`model.dtype` is float32, as now written, or bfloat16", False, "model.dtype"),
    "bf16_full_eval": _HELD_OUT,
    "fp16_full_eval": _HELD_OUT,
    "tf32": unneeded("set by PyTorch's environment, TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"),
    "gradient_checkpointing": copied(
        "train.gradient_checkpointing", True, "the same; grpox's default is false. Changes no gradient"
    ),
    "gradient_checkpointing_kwargs": copied("train.gradient_checkpointing_kwargs"),
    "torch_compile": _SPEED,
    "torch_compile_backend": _SPEED,
    "torch_compile_mode": _SPEED,
    "use_liger_kernel": _SPEED,
    "use_liger_loss": _SPEED,
    "liger_kernel_config": _SPEED,
    "use_cache": _SPEED,
    "torch_empty_cache_steps": _SPEED,
    "neftune_noise_alpha": unsupported("embeddings get no noise"),
    "auto_find_batch_size": unsupported("lower `per_device_train_batch_size`; TRL refuses it too", False),
    "logging_strategy": _LINES,
    "logging_steps": _LINES,
    "logging_first_step": _LINES,
    "logging_dir": _LINES,
    "log_on_each_node": _LINES,
    "logging_nan_inf_filter": unneeded("`train.on_nonfinite` says what a step that is not finite does", True),
    "include_num_input_tokens_seen": _LINES,
    "include_tokens_per_second": _LINES,
    "log_level": _LINES,
    "log_level_replica": _LINES,
    "disable_tqdm": _LINES,
    "report_to": differs("tracking", "`mlflow`; others are observer plugins"),
    "run_name": same("tracking.mlflow.run_name"),
    "project": differs("tracking.mlflow.experiment", "MLflow's word for it", "huggingface"),
    "trackio_space_id": _TRACKIO,
    "trackio_bucket_id": _TRACKIO,
    "trackio_static_space_id": _TRACKIO,
    "eval_strategy": differs(
        "evaluation", "needs a file of held-out prompts in `evaluation.path`; greedy by default", "no"
    ),
    "evaluation_strategy": differs("evaluation", "the old name of `eval_strategy`", "no"),
    "eval_steps": differs("evaluation.every", "needs a file of held-out prompts in `evaluation.path`"),
    "eval_delay": unsupported("an evaluation is always before the first step, and every so many", 0),
    "per_device_eval_batch_size": differs(
        "evaluation.batch_size", "prompts, not completions; only memory depends on it"
    ),
    "prediction_loss_only": _HELD_OUT,
    "eval_on_start": unneeded("there is always an evaluation before the first step", False),
    "eval_do_concat_batches": _HELD_OUT,
    "eval_use_gather_object": _HELD_OUT,
    "eval_accumulation_steps": _HELD_OUT,
    "include_for_metrics": _HELD_OUT,
    "batch_eval_metrics": _HELD_OUT,
    "save_only_model": unsupported(
        "a checkpoint holds all that resuming needs; `grpox export` takes the model", False
    ),
    "save_strategy": differs("checkpoint.every", "0 for `no`, else every so many steps", "steps"),
    "save_steps": same("checkpoint.every", 500, "the same, in whole steps; grpox's default is 100"),
    "save_on_each_node": unneeded("checkpoints need a folder that all nodes see", False),
    "save_total_limit": differs("checkpoint.keep", "grpox's default is 2; TRL keeps all"),
    "save_safetensors": unneeded("models are always safetensors", True),
    "enable_jit_checkpoint": unneeded("a run that is interrupted always leaves a checkpoint", False),
    "push_to_hub": differs("hub", "pushed at the end only; needs the repository's whole name", False),
    "hub_token": unneeded("the token comes from HF_TOKEN or `hf auth login`"),
    "hub_private_repo": same("hub.private"),
    "hub_model_id": same("hub.repo", None, "the same, as `user/name`"),
    "hub_strategy": unneeded("the model is pushed once, at the end", "every_save"),
    "hub_always_push": unneeded("the model is pushed once, at the end", False),
    "hub_revision": same("hub.revision"),
    "load_best_model_at_end": differs(
        "checkpoint.best", "the best checkpoint is kept; `grpox export` makes a model of it", False
    ),
    "metric_for_best_model": differs(
        "checkpoint.best", "a metric as docs/metrics.md names it: `eval_reward` is `evaluation/reward`"
    ),
    "greater_is_better": differs("checkpoint.best_is", "`highest` or `lowest`"),
    "ignore_data_skip": unneeded("a resumed run is the run it was", False),
    "restore_callback_states_from_checkpoint": unneeded("observers have no state", False),
    "full_determinism": unneeded("a run is a function of its run file and seed", False),
    "seed": copied("train.seed", 42, "the same; grpox's default is 0. The numbers drawn are others"),
    "data_seed": unneeded("`seed` is for the data too, as in GRPOTrainer"),
    "use_cpu": unneeded("the CPU is used where there is no accelerator", False),
    "no_cuda": unneeded("the CPU is used where there is no accelerator", False),
    "accelerator_config": _RANKS,
    "parallelism_config": _RANKS,
    "dataloader_drop_last": unneeded(
        "the last generation batch is dropped where prompts do not fill it", False
    ),
    "dataloader_num_workers": _LOADER,
    "dataloader_pin_memory": _LOADER,
    "dataloader_persistent_workers": _LOADER,
    "dataloader_prefetch_factor": _LOADER,
    "dataloader_multiprocessing_context": _LOADER,
    "dataloader_in_order": _LOADER,
    "remove_unused_columns": unneeded("reward functions are given the columns that they name", False),
    "label_names": unneeded("GRPO has no labels"),
    "train_sampling_strategy": unneeded("`shuffle_dataset` decides, as in GRPOTrainer", "random"),
    "group_by_length": unneeded("sequences of a step are sorted by length", False),
    "length_column_name": unneeded("sequences of a step are sorted by length", "length"),
    "ddp_find_unused_parameters": _RANKS,
    "ddp_bucket_cap_mb": _RANKS,
    "ddp_broadcast_buffers": _RANKS,
    "ddp_static_graph": _RANKS,
    "ddp_backend": _RANKS,
    "ddp_timeout": differs("watchdog.end_after", "seconds that one rank waits for others", 1800),
    "fsdp": _RANKS,
    "fsdp_config": _RANKS,
    "deepspeed": differs(
        "deepspeed",
        "always ZeRO-3; offloading has keys of its own, DeepSpeed's others go to `deepspeed.settings`",
    ),
    "debug": unneeded("`grpox replay` computes a bad step again", ""),
    "skip_memory_metrics": _LINES,
    "do_train": _FLAG,
    "do_eval": _FLAG,
    "do_predict": _FLAG,
    "overwrite_output_dir": unneeded("a second run moves the first one aside", False),
    "resume_from_checkpoint": unneeded("`grpox train --resume` goes on with a run"),
    "local_rank": _RANKS,
    # GRPOConfig of earlier versions
    "max_prompt_length": same("data.max_prompt_length", None, "the same, with `data.long_prompts: cut`"),
    "vllm_guided_decoding_regex": differs(
        "sampling.generation_kwargs", "TRL's old name of `vllm_structured_outputs_regex`"
    ),
    "wandb_log_unique_prompts": unneeded("a sample is shown; all are in `completions/`", False),
}
"""Field -> what answers to it."""
