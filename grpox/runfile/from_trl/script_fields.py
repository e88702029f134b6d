"""What `trl grpo` takes beside the fields of GRPOConfig, and the arguments of GRPOTrainer."""

from __future__ import annotations

from grpox.runfile.from_trl.field import TrlField, differs, same, unneeded, unsupported

_QUANTISED = unsupported("all weights are trained, in `model.dtype`")
_TOOLS = unsupported("needs a generator of your own, which samples and calls tools")

SCRIPT_FIELDS: dict[str, TrlField] = {
    "model_name_or_path": same("model.path"),
    "model_revision": same("model.init", "main", "`{revision: ...}`"),
    "dtype": differs("model.dtype", "float32 or bfloat16, which is `bf16`'s"),
    "torch_dtype": differs("model.dtype", "float32 or bfloat16, which is `bf16`'s"),
    "attn_implementation": same("model.init", None, "`{attn_implementation: ...}`"),
    "dataset_name": same("data.path"),
    "dataset_config": same("data.subset"),
    "dataset_train_split": same("data.split", "train"),
    "dataset_test_split": differs("evaluation.path", "a file of held-out prompts", "test"),
    "dataset_streaming": same("data.streaming", False),
    "datasets": differs("data", "one dataset; join several into a file"),
    "streaming": same("data.streaming", False),
    "test_split_size": unsupported("write the held-out rows to a file, for `evaluation.path`"),
    "reward_funcs": same("rewards", None, "a component or a function each"),
    "reward_model_name_or_path": same("rewards", None, "`{name: reward_model, model: ...}`"),
    "ignore_bias_buffers": unneeded("a switch for an old fault of DDP", False),
    "config": unneeded("names this file"),
    "env": unsupported("set environment variables where the run is started"),
    "use_peft": same("model.lora", False),
    "lora_r": same("model.lora", 16, "`r`"),
    "lora_alpha": same("model.lora", 32, "`alpha`"),
    "lora_dropout": differs("model.lora", "dropout is off in grpox", 0.05),
    "lora_target_modules": same("model.lora", None, "`target_modules`; all-linear where none are named"),
    "lora_target_parameters": unsupported("adapters alone are trained, of linear layers"),
    "lora_modules_to_save": unsupported("adapters alone are trained, of linear layers"),
    "lora_task_type": unneeded("a language model is trained", "CAUSAL_LM"),
    "use_rslora": same("model.lora", False, "`use_rslora`"),
    "use_dora": unsupported("adapters are added to their weights, as of LoRA itself", False),
    "load_in_8bit": _QUANTISED,
    "load_in_4bit": _QUANTISED,
    "bnb_4bit_quant_type": unneeded("belongs to `load_in_4bit`"),
    "use_bnb_nested_quant": unneeded("belongs to `load_in_4bit`"),
    "bnb_4bit_quant_storage": unneeded("belongs to `load_in_4bit`"),
}
"""Key of a YAML file for `trl grpo` -> what answers to it."""

TRAINER_ARGUMENTS: dict[str, TrlField] = {
    "model": same("model.path"),
    "reward_funcs": SCRIPT_FIELDS["reward_funcs"],
    "args": same("train"),
    "train_dataset": same("data"),
    "eval_dataset": differs("evaluation.path", "a file of held-out prompts"),
    "processing_class": unneeded("the tokenizer is read from `model.path`"),
    "tokenizer": unneeded("the tokenizer is read from `model.path`"),
    "reward_processing_classes": unneeded("a reward model's tokenizer is read from its folder"),
    "callbacks": unsupported(
        "an observer plugin sees what a callback sees; EarlyStoppingCallback is `evaluation.early_stop`"
    ),
    "optimizers": unsupported("components in `train.optimizer` and `train.scheduler`", None, "train.optimizer"),
    "quantization_config": _QUANTISED,
    "peft_config": same("model.lora", None, "a LoraConfig of literals"),
    "tools": _TOOLS,
    "rollout_func": _TOOLS,
    "environment_factory": _TOOLS,
}
"""Argument of GRPOTrainer, in its order but for `tokenizer`, its old name -> what answers to it."""

POSITIONS = tuple(name for name in TRAINER_ARGUMENTS if name != "tokenizer")
"""Arguments of GRPOTrainer that may be given without their names, in order."""
