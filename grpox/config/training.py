"""The sections `train` and `deepspeed`."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from grpox.config.component import ComponentRef, Section


class TrainConfig(Section):
    max_steps: int = Field(-1, ge=-1)
    """Optimizer steps; -1: run `num_train_epochs` epochs."""
    num_train_epochs: float = Field(1.0, gt=0)
    """Passes over the prompts when `max_steps` is -1."""
    per_device_train_batch_size: int = Field(8, ge=1)
    """Completions in one micro-batch on one rank; 8 as in TRL."""
    gradient_accumulation_steps: int = Field(1, ge=1)
    """Micro-batches of one optimizer step."""
    max_tokens_per_micro_batch: int | None = Field(None, ge=1)
    """Positions that go through the model at once on one rank, padding included, in place of the completions of
    per_device_train_batch_size: a step's sequences are sorted by length and cut anew. Changes no gradient."""
    prefix_sharing: bool = True
    """Compute a prompt once for several of its completions, where the model's attention allows it (sdpa, all
    layers full) and `chunked_logprobs` is on. Changes no gradient."""
    packing: bool = True
    """Lay the sequences of a micro-batch in one row without padding, where attention has a kernel for that
    (flash_attention_2 and its kin, on CUDA) and `chunked_logprobs` is on. It is tried before the run moves the
    model to its GPU, so for now only a model given in Python that is there is packed. Changes no gradient."""
    chunked_logprobs: bool = True
    """Compute log-probabilities from hidden states, a few tokens at a time, and never all logits, where the
    model's head is a linear layer. Changes no gradient."""
    skip_zero_advantage: bool = True
    """No backward pass for completions whose advantage is 0, where the loss says that they teach nothing and
    beta and entropy_coef are 0. Changes no gradient."""
    old_logprobs: Literal["policy", "generator"] = "policy"
    """Whose log-probabilities the ratio is taken to: the policy's before this generation batch's updates, or
    what the generator reported, which saves the forward passes that later steps need for the former."""
    max_staleness: int = Field(0, ge=0, le=1)
    """Generation batches by which the policy that samples may be older than the one that is updated; 1 samples
    the next batch while the policy is updated on this one."""
    steps_per_generation: int | None = Field(None, ge=1)
    """Micro-batches made from one generation batch; default: gradient_accumulation_steps."""
    generation_batch_size: int | None = Field(None, ge=1)
    """Completions of one generation batch over all ranks, in place of steps_per_generation."""
    num_generations: int = Field(8, ge=2)
    """Completions sampled for each prompt, at least 2: G of the GRPO paper (arXiv 2402.03300), which has 64;
    8 as in TRL."""
    num_iterations: int = Field(1, ge=1)
    """Passes over each generation batch: mu of the GRPO paper, which has 1."""
    learning_rate: float = Field(1e-6, gt=0)
    """Peak learning rate; 1e-6 as in the GRPO paper and TRL."""
    optim: Literal["adamw_torch", "adamw_torch_fused"] = "adamw_torch_fused"
    """PyTorch's AdamW by its fused kernel, as in transformers; or without it."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled decay of the weights (arXiv 1711.05101); biases and normalisation layers have none, and the
    default is 0, as in transformers."""
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of AdamW's mean of gradients; PyTorch's default."""
    adam_beta2: float = Field(0.999, ge=0, lt=1)
    """Decay of AdamW's mean of squared gradients; PyTorch's default."""
    adam_epsilon: float = Field(1e-8, gt=0)
    """Added to the root of the latter; PyTorch's default."""
    max_grad_norm: float = Field(1.0, ge=0)
    """Gradient clipping by global norm; 0 turns it off, 1 as in transformers."""
    lr_scheduler_type: str = "linear"
    """One of transformers' schedules."""
    lr_scheduler_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the schedule: ``{min_lr_rate: 0.1}`` for cosine_with_min_lr."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps over which the learning rate rises from 0; none by default, as in transformers."""
    warmup_ratio: float = Field(0.0, ge=0, lt=1)
    """The same as a part of all steps, where warmup_steps is 0."""
    optimizer: ComponentRef | None = None
    """An optimizer plugin, in place of AdamW."""
    scheduler: ComponentRef | None = None
    """A scheduler plugin, in place of lr_scheduler_type."""
    beta: float = Field(0.0, ge=0)
    """Weight of the KL penalty to the reference model: 0.04 in the GRPO paper; 0, as in TRL and DAPO, loads
    no reference model."""
    kl: Literal["k1", "k2", "k3", "unbiased"] = "k3"
    """Estimator of that KL, with rho = log ref - log pi: -rho, rho^2/2, exp(rho) - rho - 1 (Schulman 2020), or
    the last times the ratio pi/pi_old, whose gradient is unbiased off-policy (arXiv 2512.02556)."""
    sync_ref_model: bool = False
    """Let the reference follow the policy (TR-DPO, arXiv 2404.09656); needs beta > 0, or a
    loss that needs reference_logprobs."""
    ref_sync_alpha: float = Field(0.6, gt=0, le=1)
    """The reference becomes alpha * policy + (1 - alpha) * reference; 0.6 in TR-DPO."""
    ref_sync_steps: int = Field(512, ge=1)
    """Optimizer steps between two such updates; 512 in TR-DPO."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of the entropy bonus: the mean entropy of the step's tokens, in nats, times this is taken off the
    loss; 0, as in TRL, gives none."""
    top_entropy_quantile: float = Field(1.0, ge=0, le=1)
    """The part of a step's tokens, those of the highest entropy, that the policy loss is made of (arXiv
    2506.01939, which has 0.2); 1 takes all. Costs a forward pass in each step."""
    off_policy_mask_threshold: float | None = Field(None, ge=0)
    """Leave completions with a negative advantage out of the policy loss that the generator thought this many
    nats per token more likely than the policy does, on average (DeepSeek-V3.2, arXiv 2512.02556, eq. 9)."""
    dynamic_sampling_rounds: int | None = Field(None, ge=1)
    """Rounds of sampling, after the first, that replace groups whose rewards are all equal by groups of prompts
    drawn anew (DAPO's dynamic sampling, arXiv 2503.14476); null: such groups stay."""
    mask_truncated_completions: bool = False
    """Leave completions that ran into max_completion_length out of the loss (DAPO, arXiv 2503.14476)."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """Effect of a loss or gradient that is NaN or infinite, before it touches a weight: end the run, or skip
    the step. The batch is kept for `grpox replay` either way."""
    max_skips_in_a_row: int = Field(5, ge=1)
    """Steps skipped one after the other that end the run all the same."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
    gradient_checkpointing_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Passed to transformers' gradient_checkpointing_enable; use_reentrant is False unless given."""
    shuffle_dataset: bool = True
    """Shuffle the prompts once per epoch."""
    seed: int = Field(0, ge=0, le=2**32 - 1)
    """Seeds the shuffle, sampling and every library."""

    @model_validator(mode="after")
    def _has_a_reference(self) -> Self:
        return self


class DeepSpeedConfig(Section):
    stage: Literal[3] = 3
    """ZeRO stage: grpox runs on ZeRO-3."""
    stage3_param_persistence_threshold: int | None = Field(None, ge=0)
    """Parameters smaller than this stay whole on every rank; default: DeepSpeed's (100000)."""
    offload_optimizer: Literal["none", "cpu", "nvme"] = "none"
    """Place of the optimizer states, instead of the accelerator's memory."""
    offload_param: Literal["none", "cpu", "nvme"] = "none"
    """Place of the parameters' shards between their uses."""
    nvme_path: str | None = None
    """Folder on a fast local disk, for whatever is offloaded to nvme."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """DeepSpeed's own configuration, merged over grpox's; what grpox itself sets is refused here."""
