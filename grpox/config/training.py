"""The sections `train` and `deepspeed`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from grpox.config.component import ComponentRef, Section

TOKENS_ON_GPU = 16_384
"""Positions of a micro-batch on CUDA for ``max_tokens_per_micro_batch: auto``. By arithmetic, computing takes
as long as gathering the weights at 2,000 positions over NVLink, and at 12,000 over a network of 400 Gb/s."""


def tokens_on(given: int | Literal["auto"] | None, gpu: bool, divides: bool) -> int | None:
    """Return the positions that a value of ``train.max_tokens_per_micro_batch`` means; None: no such limit.

    Args:
        gpu: ranks have a GPU.
        divides: the loss lets a step's completions be divided into micro-batches anew.
    """
    if isinstance(given, str):
        return TOKENS_ON_GPU if gpu and divides else None
    return given


class AdaptiveEntropyConfig(Section):
    """An entropy coefficient that follows the entropy (Skywork-OR1, arXiv 2505.22312); defaults as in TRL."""

    target: float = Field(0.2, ge=0)
    """Entropy in nats per token, as the metric `entropy`: up to it the coefficient grows and the bonus acts."""
    delta: float = Field(0.005, gt=0)
    """Change of the coefficient after each step."""
    min: float = Field(0.0, ge=0)
    """Smallest coefficient."""
    max: float = Field(1.0, ge=0)
    """Largest coefficient."""


class TrainConfig(Section):
    max_steps: int = Field(-1, ge=-1)
    """Number of optimizer steps; -1: train for `num_train_epochs` epochs."""
    num_train_epochs: float = Field(1.0, gt=0)
    """Number of passes over the prompts if `max_steps` is -1."""
    per_device_train_batch_size: int = Field(8, ge=1)
    """Number of completions in one micro-batch on one rank; 8 as in TRL."""
    gradient_accumulation_steps: int = Field(1, ge=1)
    """Number of micro-batches in one optimizer step."""
    max_tokens_per_micro_batch: Annotated[int, Field(ge=1)] | Literal["auto"] | None = "auto"
    """Number of positions per forward pass on one rank, including padding, instead of the number of completions
    in per_device_train_batch_size; null: no such limit. A step's sequences are sorted by length and divided
    again. Gradients do not change. ``auto``: 16384 on GPUs with CUDA, for losses that are not normalised in
    each micro-batch or group; else null."""
    prefix_sharing: bool | Literal["auto"] = "auto"
    """Compute a prompt once for several of its completions, if the model's attention allows it (sdpa, full
    attention in all layers) and `chunked_logprobs` is on. ``auto``: on CPUs with sdpa, where it saves time; not
    on CUDA, where its mask rules out flash kernels. Gradients do not change."""
    packing: bool = True
    """Join the sequences of a micro-batch in one row without padding, if attention accepts their lengths
    (grpox_varlen, flash_attention_2 and similar) and `chunked_logprobs` is on. Gradients do not change."""
    chunked_logprobs: bool = True
    """Compute log-probabilities from hidden states, a few tokens at a time, without storing all logits, if the
    model's head is a linear layer. Gradients do not change."""
    skip_zero_advantage: bool = True
    """Skip the backward pass for completions with advantage 0, if the loss declares that their gradient is 0
    and the loss has no KL penalty and no entropy bonus. Gradients do not change."""
    old_logprobs: Literal["policy", "generator"] = "policy"
    """Source of the ratio's old log-probabilities. ``policy``: computed with the weights before the first
    update on the generation batch. ``generator``: as reported while sampling, for every token and without a
    correction; this saves forward passes if several optimizer steps train on one generation batch."""
    max_staleness: int = Field(0, ge=0, le=1)
    """Number of generation batches by which the sampling policy may lag behind; 1: sample the next batch while
    the policy is updated on this one."""
    steps_per_generation: int | None = Field(None, ge=1)
    """Number of micro-batches in one generation batch; default: gradient_accumulation_steps."""
    generation_batch_size: int | None = Field(None, ge=1)
    """Number of completions in one generation batch over all ranks, instead of steps_per_generation."""
    num_generations: int = Field(8, ge=2)
    """Number of completions sampled for each prompt, at least 2: G in the GRPO paper (arXiv 2402.03300), which
    uses 64; 8 as in TRL."""
    num_iterations: int = Field(1, ge=1)
    """Number of passes over each generation batch: mu in the GRPO paper, which uses 1."""
    learning_rate: float = Field(1e-6, gt=0)
    """Peak learning rate; 1e-6 as in the GRPO paper and TRL."""
    optim: Literal["adamw_torch", "adamw_torch_fused"] = "adamw_torch_fused"
    """PyTorch's AdamW, with its fused kernel (as in transformers) or without."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay (arXiv 1711.05101), without biases and normalisation layers; 0 as in
    transformers."""
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of AdamW's running mean of gradients; PyTorch's default."""
    adam_beta2: float = Field(0.999, ge=0, lt=1)
    """Decay of AdamW's running mean of squared gradients; PyTorch's default."""
    adam_epsilon: float = Field(1e-8, gt=0)
    """Added to the square root of AdamW's mean of squared gradients; PyTorch's default."""
    max_grad_norm: float = Field(1.0, ge=0)
    """Largest global gradient norm, by clipping; 0 turns clipping off; 1 as in transformers."""
    lr_scheduler_type: str = "linear"
    """Learning-rate schedule, one of transformers'."""
    lr_scheduler_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the schedule: ``{min_lr_rate: 0.1}`` for cosine_with_min_lr."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps over which the learning rate rises from 0; 0 as in transformers."""
    warmup_ratio: float = Field(0.0, ge=0, lt=1)
    """Warm-up steps as a fraction of all steps, if warmup_steps is 0."""
    optimizer: ComponentRef | None = None
    """An optimizer plugin, instead of AdamW."""
    scheduler: ComponentRef | None = None
    """A scheduler plugin, instead of lr_scheduler_type."""
    beta: float = Field(0.0, ge=0)
    """Weight of the KL penalty to the reference model: 0.04 in the GRPO paper. With 0, as in TRL and DAPO, no
    reference model is loaded."""
    kl: Literal["k1", "k2", "k3", "unbiased"] = "k3"
    """Estimator of the KL penalty, with rho = log ref - log pi. k1: -rho; k2: rho^2/2; k3: exp(rho) - rho - 1
    (Schulman 2020); unbiased: k3 times the ratio pi/pi_old, whose gradient is unbiased off-policy (arXiv
    2512.02556)."""
    sync_ref_model: bool = False
    """Move the reference model towards the policy (TR-DPO, arXiv 2404.09656); needs beta > 0, or a
    loss that needs reference_logprobs."""
    ref_sync_alpha: float = Field(0.6, gt=0, le=1)
    """Weight alpha of the policy: the reference becomes alpha * policy + (1 - alpha) * reference; 0.6 in
    TR-DPO."""
    ref_sync_steps: int = Field(512, ge=1)
    """Optimizer steps between updates of the reference model; 512 in TR-DPO."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of the entropy bonus: the loss is reduced by this weight times the mean entropy of the step's
    tokens, in nats; 0, as in TRL, means no bonus."""
    adaptive_entropy: AdaptiveEntropyConfig | None = None
    """Move entropy_coef after each step, so that the entropy stays near a target; default: it is constant."""
    router_aux_loss_coef: float = Field(0.0, ge=0)
    """Weight of the load-balancing loss of a model with experts (Switch Transformers, arXiv 2101.03961), as
    transformers computes it for a micro-batch; 0: no such loss, whatever the model's configuration says."""
    top_entropy_quantile: float = Field(1.0, ge=0, le=1)
    """Fraction of a step's tokens that the policy loss uses: the tokens with the highest entropy (arXiv
    2506.01939, which uses 0.2). 1 uses all tokens; any other value costs a forward pass in each step."""
    off_policy_mask_threshold: float | None = Field(None, ge=0)
    """Leave tokens with a negative advantage out of the policy loss if the log-probability of their completion,
    averaged over its tokens, is more than this many nats higher for the generator than for the current policy
    (DeepSeek-V3.2, arXiv 2512.02556, eq. 9). Tokens without a reported log-probability add 0."""
    dynamic_sampling_rounds: int | None = Field(None, ge=1)
    """Largest number of extra sampling rounds that replace groups with equal rewards by groups of new prompts
    (DAPO's dynamic sampling, arXiv 2503.14476); null: groups with equal rewards stay."""
    mask_truncated_completions: bool = False
    """Leave completions that reached max_completion_length out of the loss (DAPO, arXiv 2503.14476)."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """Handling of a NaN or infinite loss or gradient, before weights change: end the run, or skip the step. In
    both cases the batch is saved for `grpox replay`."""
    max_skips_in_a_row: int = Field(5, ge=1)
    """Number of consecutive skipped steps after which the run ends."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass, to save memory."""
    gradient_checkpointing_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments for transformers' gradient_checkpointing_enable; use_reentrant is False by default."""
    deterministic: bool = False
    """On GPUs, use only operations that compute the same bits again, and end the run at one that cannot. It is
    slower, and generators with an engine of their own (vLLM) are refused. On a CPU it changes nothing."""
    shuffle_dataset: bool = True
    """Shuffle the prompts once per epoch."""
    seed: int = Field(0, ge=0, le=2**32 - 1)
    """Seed of shuffling, sampling and every library."""

    @property
    def has_entropy_bonus(self) -> bool:
        """True if the loss of a step can have an entropy bonus."""
        return self.entropy_coef > 0 or self.adaptive_entropy is not None


class DeepSpeedConfig(Section):
    stage: Literal[3] = 3
    """ZeRO stage; grpox supports only 3."""
    stage3_param_persistence_threshold: int | None = Field(None, ge=0)
    """Size below which parameters stay whole on every rank; default: DeepSpeed's (100000)."""
    offload_optimizer: Literal["none", "cpu", "nvme"] = "none"
    """Place of the optimizer states; default: the accelerator's memory."""
    offload_param: Literal["none", "cpu", "nvme"] = "none"
    """Place of the parameter shards between uses; default: the accelerator's memory."""
    nvme_path: str | None = None
    """Folder on a fast local disk for data offloaded to nvme."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """DeepSpeed's own configuration, merged over grpox's; keys that grpox sets are refused."""
