"""The fields that TRL's GRPOConfig itself has, as of 1.16.0, in its order. docs/from-trl.md shows them all."""

from __future__ import annotations

from grpox.runfile.from_trl.field import TrlField, copied, differs, same, unneeded, unsupported

_ADAPTIVE = "the weight of the entropy bonus stays what `train.entropy_coef` says"

GRPO_FIELDS: dict[str, TrlField] = {
    # Model and reference
    "model_init_kwargs": differs(
        "model.init", "`dtype` is `model.dtype`; placement and quantisation are refused"
    ),
    "trust_remote_code": differs("model.init", "an argument there, and for the trained model only", False),
    "router_aux_loss_coef": unsupported(
        "there is no load-balancing term: 0.0 in TRL, unset TRL takes the model's own", inert=(0.0, 0)
    ),
    "disable_dropout": differs("", "dropout is always off, in training as in sampling", False),
    "cast_lm_head_to_fp32": unsupported(
        "logits are raised to float32 after the head; `model.dtype: float32` computes all in it", False
    ),
    # Data
    "num_generations": copied("train.num_generations", 8),
    "num_generations_eval": differs(
        "evaluation.num_generations",
        "1 by default, where TRL has `num_generations`; more than 1 needs an `evaluation.temperature` above 0",
    ),
    "max_completion_length": copied("sampling.max_completion_length", 512, "the same; grpox's default is 256"),
    "ds3_gather_for_generation": same("generator.gather_weights", True, "the same, a parameter of `hf`"),
    "shuffle_dataset": copied("train.shuffle_dataset", True, "the same; the order itself is another"),
    "pad_to_multiple_of": unneeded("padding changes no gradient, and is chosen by grpox", "auto"),
    # Generation
    "generation_batch_size": copied("train.generation_batch_size"),
    "steps_per_generation": copied("train.steps_per_generation"),
    "temperature": copied("sampling.temperature", 1.0),
    "top_p": copied("sampling.top_p", 1.0),
    "top_k": copied("sampling.top_k", 0),
    "min_p": copied("sampling.min_p"),
    "generation_kwargs": differs(
        "sampling.generation_kwargs", "what has a key of its own in `sampling` goes there; beams are refused"
    ),
    "chat_template_kwargs": copied("model.chat_template_kwargs"),
    "repetition_penalty": copied("sampling.repetition_penalty", 1.0),
    "cache_implementation": same("generator.cache_implementation", None, "the same, a parameter of `hf`"),
    # vLLM
    "use_vllm": same("generator", False, "`vllm-colocate` or `vllm-server`, by `vllm_mode`; else `hf`"),
    "vllm_mode": differs("generator", "a server is started by `grpox serve`, not by `vllm serve`", "colocate"),
    "vllm_model_impl": same(
        "generator.engine", "vllm", "`{model_impl: ...}`; of a server, an argument of `grpox serve`"
    ),
    "vllm_enable_sleep_mode": same("generator.sleep", False, "the same; grpox's default is true"),
    "vllm_structured_outputs_regex": differs(
        "sampling.generation_kwargs", "`{structured_outputs: {regex: ...}}`; allows no correction"
    ),
    "vllm_server_base_url": same("generator.urls", None, "a list: there may be several servers"),
    "vllm_server_host": same("generator.urls", "0.0.0.0", "`http://host:port`"),
    "vllm_server_port": same("generator.urls", 8000, "`http://host:port`"),
    "vllm_server_timeout": differs("generator.start_timeout", "at most 1500 seconds", 240.0),
    "vllm_group_port": unneeded("grpox chooses a free port", 51216),
    "vllm_gpu_memory_utilization": same(
        "generator.gpu_memory_utilization", 0.3, "the same; of a server, an option of `grpox serve`"
    ),
    "vllm_max_model_length": same(
        "generator.max_model_len", None, "the same; of a server, an option of `grpox serve`"
    ),
    "vllm_tensor_parallel_size": same(
        "generator.tensor_parallel_size", 1, "the same; of a server, an option of `grpox serve`"
    ),
    # Training
    "beta": copied("train.beta", 0.0),
    "num_iterations": copied("train.num_iterations", 1),
    "epsilon": same("loss.clip_low", 0.2, "the same, of the clipped losses"),
    "delta": same("loss.delta", None, "the same, of the clipped losses; must be more than 1 + `clip_high`"),
    "epsilon_high": same("loss.clip_high", None, "the same; with `cispo` it is `loss.cap`, at least 1"),
    "sapo_temperature_neg": same("loss.tau_neg", 1.05, "the same, of `sapo`"),
    "sapo_temperature_pos": same("loss.tau_pos", 1.0, "the same, of `sapo`"),
    "vespo_k_pos": same("loss.k_pos", 2.0, "the same, of the plugin grpox-vespo"),
    "vespo_lambda_pos": same("loss.lambda_pos", 3.0, "the same, of the plugin grpox-vespo"),
    "vespo_k_neg": same("loss.k_neg", 3.0, "the same, of the plugin grpox-vespo"),
    "vespo_lambda_neg": same("loss.lambda_neg", 2.0, "the same, of the plugin grpox-vespo"),
    "importance_sampling_level": differs(
        "loss.level", "of the clipped losses; `cispo` and `sapo` have one ratio per token", "token"
    ),
    "reward_weights": same("rewards[0].weight", None, "`weight` of each reward"),
    "multi_objective_aggregation": same(
        "advantage.aggregation", "sum_then_normalize", "a parameter of the advantage `group`"
    ),
    "scale_rewards": same("advantage", "group", "`group`, `batch` or `none`; true is `group`, false is `none`"),
    "loss_type": differs(
        "loss",
        "`dapo` and `cispo` count the tokens of the optimizer step, TRL those of the generation batch; "
        "`vespo` is a plugin, `luspo` is not there",
        "dapo",
    ),
    "mask_truncated_completions": copied("train.mask_truncated_completions", False),
    "sync_ref_model": copied("train.sync_ref_model", False),
    "ref_model_mixup_alpha": copied("train.ref_sync_alpha", 0.6),
    "ref_model_sync_steps": copied("train.ref_sync_steps", 512),
    "top_entropy_quantile": copied(
        "train.top_entropy_quantile", 1.0, "the same, of the tokens of the optimizer step, not of a micro-batch"
    ),
    "entropy_coef": copied(
        "train.entropy_coef",
        0.0,
        "the same, times the mean over the optimizer step, not over micro-batches, and over all its tokens",
    ),
    "use_adaptive_entropy": unsupported(_ADAPTIVE, False),
    "entropy_coef_min": unsupported(_ADAPTIVE, 0.0),
    "entropy_coef_max": unsupported(_ADAPTIVE, 1.0),
    "entropy_coef_delta": unsupported(_ADAPTIVE, 0.005),
    "entropy_target": unsupported(_ADAPTIVE, 0.2),
    "max_tool_calling_iterations": unsupported("there are no tools, unless in a generator of your own"),
    "vllm_importance_sampling_correction": differs(
        "correction", "false is `none`; refused where sampling is not from the trained distribution", True
    ),
    "vllm_importance_sampling_mode": same(
        "correction", "sequence_mask", "the same names with a hyphen; grpox's default is `token-truncate`"
    ),
    "vllm_importance_sampling_clip_max": differs(
        "correction.cap", "`cap` where it truncates, `high` where it masks; at least 1", 3.0
    ),
    "vllm_importance_sampling_clip_min": differs(
        "correction.low", "`low` where it masks; what truncates has no lower bound"
    ),
    "off_policy_mask_threshold": copied("train.off_policy_mask_threshold"),
    "use_bias_correction_kl": differs(
        "train.kl", "true is `unbiased`, by the ratio of tokens at any level; false is `k3`", True
    ),
    # Logging
    "log_completions": differs(
        "logging.completions_every", "every so many steps; saved as parquet always", False
    ),
    "log_multimodal": unneeded("grpox trains on text", True),
    "num_completions_to_print": unneeded("a sample is shown; all are in `completions/`"),
    "log_unique_prompts": unneeded("a sample is shown; all are in `completions/`", False),
    "log_completions_hub_repo": unsupported("they are in the run's folder and in MLflow"),
    # Continuous batching
    "use_transformers_continuous_batching": same(
        "generator.continuous_batching", False, "the same, a parameter of `hf`"
    ),
    "transformers_continuous_batching_config": unsupported("grpox sizes its cache by itself"),
    # Deprecated
    "use_transformers_paged": same(
        "generator.continuous_batching", False, "TRL's old name of `use_transformers_continuous_batching`"
    ),
    "vllm_importance_sampling_cap": differs(
        "correction.cap", "TRL's old name of `vllm_importance_sampling_clip_max`"
    ),
}
"""Field of GRPOConfig -> what answers to it."""
