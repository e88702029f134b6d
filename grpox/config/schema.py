"""The run file's schema: pydantic models, one section each, none of which imports torch.

`RunConfig` holds what the core itself understands. What belongs to a component stays in its `ComponentRef`
and is checked against that component's own config once the registry has found it (`grpox.runfile.load`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


class Section(BaseModel):
    """A section of the run file: unknown keys are refused, fields carry their documentation."""

    model_config = ConfigDict(
        extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )


class ComponentRef(BaseModel):
    """A component by name (``dapo``, ``dist:dapo``) or by path (``my_loss.py:MyLoss``), with its parameters.

    In a run file either the bare name, or a mapping of `name` or `path` and the component's parameters.
    """

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)

    name: str | None = None
    path: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _shorthand(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        if (self.name is None) == (self.path is None):
            raise ValueError("give exactly one of 'name' and 'path'")
        return self

    @property
    def params(self) -> dict[str, Any]:
        """The component's own parameters, not yet checked."""
        return dict(self.model_extra or {})

    @property
    def label(self) -> str:
        """What messages and metrics call it: the name, or the object's name of a path."""
        return self.name or (self.path or "").rpartition(":")[2]


class RewardRef(ComponentRef):
    """A reward function, its weight in the sum, and what happens when it fails."""

    weight: float = Field(1.0, allow_inf_nan=False)
    """Factor of this function's scores in the sum; negative for a penalty."""
    on_error: Literal["fail", "abstain"] = "fail"
    """What a reward that raises, takes too long, or returns NaN, infinity or the wrong number of scores does:
    end the run, or abstain for those completions, which is counted in ``rewards/<name>/errors``."""
    timeout: float = Field(600.0, gt=0, allow_inf_nan=False)
    """Seconds that one call may take; beyond, `on_error` decides."""
    isolation: Literal["process", "thread"] | None = None
    """Where it is called: in a process of its own, which can be killed, or in a thread of the trainer.
    Default: a process for one named by `path` or of a plugin, a thread for built-ins and Python objects."""
    memory: float = Field(16.0, gt=0, allow_inf_nan=False)
    """GiB that its own process may hold, with those it starts; beyond, it is killed and `on_error` decides."""


class LoraConfig(Section):
    """Adapters of low rank (arXiv 2106.09685): W + (alpha / r) B A, of which A and B alone are trained."""

    r: int = Field(16, ge=1)
    """Rank of the product B A."""
    alpha: int = Field(32, ge=1)
    """The product is scaled by alpha / r. 16 and 32 as in TRL."""
    dropout: float = Field(0.0, ge=0)
    """0 and nothing else: as all dropout is off, so that sampling and training see one distribution."""
    target_modules: Literal["all-linear"] | list[str] = "all-linear"
    """Linear layers that get an adapter, by the ends of their names: ``[q_proj, v_proj]``; or all of them but
    the head."""
    exclude_modules: list[str] = Field(default_factory=list)
    """Of these, layers that get none, by the ends of their names."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(r) instead (arXiv 2312.03732)."""

    @field_validator("dropout")
    @classmethod
    def _off(cls, dropout: float) -> float:
        if dropout != 0:
            raise ValueError("dropout is off in grpox, so that sampling and training see one distribution: 0")
        return dropout

    @field_validator("target_modules")
    @classmethod
    def _some(cls, target_modules: str | list[str]) -> str | list[str]:
        if target_modules == [] or (isinstance(target_modules, list) and "" in target_modules):
            raise ValueError("no module is named: all-linear, or a list of names such as [q_proj, v_proj]")
        return target_modules


class ModelConfig(Section):
    path: str
    """A local folder in Hugging Face format (or a hub id, where the hub can be reached)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the weights in training; optimizer states are float32."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Passed to the tokenizer's chat template for conversational prompts."""
    init: dict[str, Any] = Field(default_factory=dict)
    """Passed to transformers' `from_pretrained`: attn_implementation, revision, trust_remote_code, ..."""
    lora: LoraConfig | None = None
    """Train adapters and nothing else, with peft (``pip install 'grpox[lora]'``); default: all weights."""


class DataConfig(Section):
    path: str | None = None
    """A .jsonl, .json, .csv or .parquet file, or the id of a dataset on the hub."""
    subset: str | None = None
    """Configuration of a hub dataset that has several."""
    split: str = "train"
    """Split of a hub dataset, as `datasets` writes it: ``train``, ``train[:1000]``."""
    streaming: bool = False
    """Read rows as they are needed, without an index of all of them: for data larger than the disk."""
    source: ComponentRef | None = None
    """A dataset plugin, in place of `path`."""
    prompt_column: str = "prompt"
    """Column with the prompt: a string, or a list of role/content messages."""
    max_prompt_length: int | None = Field(None, ge=1)
    """Tokens a prompt may have; default: what the model's positions leave beside a completion."""
    long_prompts: Literal["refuse", "cut"] = "refuse"
    """What happens to a longer prompt: the run is refused, naming the row, or its left end is cut off."""

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        if (self.path is None) == (self.source is None):
            raise ValueError("give exactly one of 'path' and 'source'")
        return self


class EarlyStopConfig(Section):
    """When a run ends because its evaluations show no more gain; the names are those of common callbacks."""

    metric: str
    """Metric of the evaluations: ``accuracy``, ``pass_at_4``, ``rewards/exact/mean``."""
    patience: int = Field(1, ge=1)
    """Evaluations in a row without a gain that end the run."""
    min_delta: float = Field(0.0, ge=0)
    """A gain is more than this better than the best value so far."""
    mode: Literal["max", "min"] = "max"
    """Whether larger values of the metric are better, or smaller ones."""


class EvaluationSamplingConfig(Section):
    """Keys of `sampling` that evaluations have otherwise; null: as `sampling` has them."""

    max_completion_length: int | None = Field(None, ge=1)
    """Tokens a completion may have at most, EOS included."""
    min_completion_length: int | None = Field(None, ge=0)
    """Tokens before which a completion cannot end by EOS."""
    temperature: float | None = Field(None, ge=0)
    """Divides the logits; 0 decodes greedily; null: `evaluation.temperature`."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Nucleus sampling; 1 keeps every token."""
    top_k: int | None = Field(None, ge=0)
    """Keep the k most likely tokens; 0 keeps all."""
    min_p: float | None = Field(None, ge=0, le=1)
    """Keep tokens at least this likely relative to the likeliest; 0 keeps all."""
    repetition_penalty: float | None = Field(None, gt=0)
    """Divides the logits of tokens that have occurred; 1 does nothing."""
    stop: list[str] | None = None
    """Texts that end a completion, in place of the run's."""
    stop_token_ids: list[int] | None = None
    """Tokens that end a completion besides EOS, in place of the run's."""
    generation_kwargs: dict[str, Any] | None = None
    """Passed to the generator's library, in place of the run's."""


class EvaluationConfig(Section):
    path: str
    """Held-out prompts, in a file of the same form as the training data."""
    every: int = Field(0, ge=0)
    """Optimizer steps between evaluations; 0: only before and after training."""
    accuracy: str | None = None
    """Reward whose mean is reported as the accuracy; default: the first one."""
    temperature: float = Field(0.0, ge=0)
    """0 decodes greedily."""
    batch_size: int = Field(256, ge=1)
    """Prompts generated together on each rank."""
    sampling: EvaluationSamplingConfig = EvaluationSamplingConfig()
    """Keys of `sampling` that evaluations have otherwise."""
    rewards: list[RewardRef] | None = Field(None, min_length=1)
    """Reward functions of evaluations; default: those of the run."""
    num_generations: int = Field(1, ge=1)
    """Completions sampled for each prompt; TRL's num_generations_eval."""
    pass_at_k: list[int] = Field(default_factory=list)
    """Report the chance that at least one of k completions is right (arXiv 2107.03374), for each k listed."""
    right_at: float = 1.0
    """A completion is right, for pass_at_k, whose score by the reward `accuracy` is at least this."""
    early_stop: EarlyStopConfig | None = None
    """End the run when its evaluations show no more gain; default: never."""


class SamplingConfig(Section):
    max_completion_length: int = Field(256, ge=1)
    """Tokens a completion may have at most, EOS included. TRL 1.16 has 512."""
    min_completion_length: int = Field(0, ge=0)
    """Tokens before which a completion cannot end by EOS."""
    temperature: float = Field(1.0, gt=0)
    """Divides the logits in generation and in training alike; 1 samples from the policy itself."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling (arXiv 1904.09751); 1 keeps every token, as GRPO assumes."""
    top_k: int = Field(0, ge=0)
    """Keep the k most likely tokens; 0 keeps all."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Keep tokens at least this likely relative to the likeliest (arXiv 2407.01082); 0 keeps all."""
    repetition_penalty: float = Field(1.0, gt=0)
    """Divides the logits of tokens that have occurred (CTRL, arXiv 1909.05858); 1 does nothing."""
    stop: list[str] = Field(default_factory=list)
    """Texts that end a completion; they stay part of it."""
    stop_token_ids: list[int] = Field(default_factory=list)
    """Tokens that end a completion, besides the EOS tokens of model and tokenizer."""
    generation_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Passed to the generator's library as it is: transformers' GenerationConfig for hf."""

    @model_validator(mode="after")
    def _can_end(self) -> Self:
        low, high = self.min_completion_length, self.max_completion_length
        if low > high:
            raise ValueError(f"min_completion_length {low} is more than max_completion_length {high}")
        if "" in self.stop:
            raise ValueError("a text in stop is empty: every completion would end at once")
        return self


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
    """Let the reference follow the policy (TR-DPO, arXiv 2404.09656); needs beta > 0."""
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
    """What a loss or gradient that is NaN or infinite does, before it touches a weight: end the run, or skip
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
        if self.sync_ref_model and self.beta == 0:
            raise ValueError("sync_ref_model needs beta > 0: with beta 0 there is no reference")
        return self


class DeepSpeedConfig(Section):
    stage: Literal[3] = 3
    """ZeRO stage: grpox runs on ZeRO-3."""
    stage3_param_persistence_threshold: int | None = Field(None, ge=0)
    """Parameters smaller than this stay whole on every rank; default: DeepSpeed's (100000)."""
    offload_optimizer: Literal["none", "cpu", "nvme"] = "none"
    """Where optimizer states live, in place of the accelerator's memory."""
    offload_param: Literal["none", "cpu", "nvme"] = "none"
    """Where the shards of the parameters live between their uses."""
    nvme_path: str | None = None
    """Folder on a fast local disk, for whatever is offloaded to nvme."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """DeepSpeed's own configuration, merged over grpox's; what grpox itself sets is refused here."""


class HubConfig(Section):
    repo: str
    """Repository on the hub that the trained model is pushed to, ``user/name``; the token comes from the
    environment (HF_TOKEN) or `hf auth login`."""
    private: bool = False
    """Whether a repository that is created is private."""
    revision: str | None = None
    """Branch to push to; default: the repository's main branch."""


class CheckpointConfig(Section):
    every: int = Field(100, ge=0)
    """Optimizer steps between checkpoints; 0: none but the one that an interrupted run leaves."""
    last: bool | None = None
    """Save one after the last step too; default: where `every` is not 0."""
    keep: int = Field(2, ge=1)
    """How many of the newest are kept."""
    best: str | None = None
    """Metric whose best checkpoint is kept besides: ``reward``, ``evaluation/accuracy``."""
    best_is: Literal["highest", "lowest", "max", "min"] = "highest"
    """Which value of that metric is the best; max is highest, min is lowest."""
    background: bool = False
    """Let a thread write while training goes on: costs memory for a copy of weights and optimizer states."""

    @property
    def saves_last(self) -> bool:
        """Return True where one of the last step is saved."""
        return self.every > 0 if self.last is None else self.last


class LoggingConfig(Section):
    completions_every: int = Field(10, ge=0)
    """Optimizer steps between samples of completions shown in the terminal; 0: never."""
    save_completions_every: int = Field(1, ge=0)
    """Generation batches between completions written as parquet; 0: never."""
    system_metrics_every: float = Field(10.0, ge=0)
    """Seconds between readings of each machine's CPU, memory, disk, network and GPUs, written to system/; 0:
    none."""


class WatchdogConfig(Section):
    tell_after: float = Field(300.0, gt=0)
    """Seconds in one phase after which a rank says where it is and writes its threads' stacks to stalls/."""
    end_after: float = Field(1800.0, gt=0)
    """Seconds in one phase after which the run ends as failed; also what one rank waits for the others."""
    host_lost_after: float = Field(120.0, ge=1)
    """Seconds of silence after which a machine counts as lost, its network or power gone; answers of its kernel
    count, so that a slow rank is none."""


class PluginsConfig(Section):
    disable: list[str] = Field(default_factory=list)
    """Distributions whose plugins are not loaded."""
    required: list[str] = Field(default_factory=list)
    """Distributions that must be installed, for example ``grpox-foo>=1.2``."""


class RunConfig(Section):
    """One training run."""

    model: ModelConfig
    """The model to train."""
    data: DataConfig
    """The prompts."""
    rewards: list[RewardRef] = Field(min_length=1)
    """Reward functions; the reward of a completion is their weighted sum."""
    generator: ComponentRef = ComponentRef(name="hf")
    """What samples the completions."""
    advantage: ComponentRef = ComponentRef(name="group")
    """What turns rewards into advantages; group as in GRPO (arXiv 2402.03300)."""
    loss: ComponentRef = ComponentRef(name="dapo")
    """The policy loss; dapo (arXiv 2503.14476) weighs every token of a step alike, and is TRL's default too."""
    correction: ComponentRef = ComponentRef(name="none")
    """Weights for what separates the generator's distribution from the trainer's."""
    train: TrainConfig = TrainConfig()
    """Batches, optimizer, length of the run."""
    sampling: SamplingConfig = SamplingConfig()
    """The distribution that is sampled from."""
    deepspeed: DeepSpeedConfig = DeepSpeedConfig()
    """The engine, ZeRO-3."""
    evaluation: EvaluationConfig | None = None
    """Held-out prompts; default: nothing is evaluated."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """What an interrupted run goes on from."""
    logging: LoggingConfig = LoggingConfig()
    """Completions in the terminal and on disk."""
    watchdog: WatchdogConfig = WatchdogConfig()
    """What happens when a rank stalls."""
    hub: HubConfig | None = None
    """Push the trained model to the hub; default: it stays in output_dir."""
    tracking: dict[str, dict[str, Any]] = {"mlflow": {}}
    """Observers by name with their parameters; MLflow by default, `{}` for none."""
    plugins: PluginsConfig = PluginsConfig()
    """Which plugins are loaded."""
    output_dir: str = "runs/default"
    """Folder for everything the run writes, relative to the working directory."""

    @property
    def reward_labels(self) -> list[str]:
        """What metrics and files call each reward: its name, numbered where it comes again: regex, regex-2."""
        return labels_of(self.rewards)


def labels_of(rewards: Sequence[RewardRef]) -> list[str]:
    """What metrics and files call each of `rewards`: see `RunConfig.reward_labels`."""
    labels: list[str] = []
    for reward in rewards:
        before = sum(other.label == reward.label for other in rewards[: len(labels)])
        labels.append(f"{reward.label}-{before + 1}" if before else reward.label)
    return labels
