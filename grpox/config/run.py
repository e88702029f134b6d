"""A run file as a whole, as far as the core itself understands it."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from grpox.config.component import ComponentRef, RewardRef, Section, labels_of
from grpox.config.inputs import DataConfig, ModelConfig
from grpox.config.outputs import CheckpointConfig, HubConfig, LoggingConfig, PluginsConfig, WatchdogConfig
from grpox.config.sampling import EvaluationConfig, SamplingConfig
from grpox.config.training import DeepSpeedConfig, TrainConfig

REWARD_OF_MODEL = "reward_model"
"""The reward that scores with a model given in Python; it is built as ``Class(config, model=model)``."""
CORRECTION_OF_OTHERS = "token-truncate"
"""The default correction where the generator's numbers or weights are not the trainer's."""


class RunConfig(Section):
    """One training run."""

    model: ModelConfig
    """The model to train."""
    data: DataConfig
    """The prompts."""
    rewards: list[RewardRef] = Field(min_length=1)
    """Reward functions; the reward of a completion is their weighted sum."""
    generator: ComponentRef = ComponentRef(name="hf")
    """Generator that samples the completions."""
    advantage: ComponentRef = ComponentRef(name="group")
    """Scaler that turns rewards into advantages; group as in GRPO (arXiv 2402.03300)."""
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
    """Checkpoints, from which an interrupted run goes on."""
    logging: LoggingConfig = LoggingConfig()
    """Completions in the terminal and on disk."""
    watchdog: WatchdogConfig = WatchdogConfig()
    """Watchdog for ranks that stall."""
    hub: HubConfig | None = None
    """Push the trained model to the hub; default: it stays in output_dir."""
    tracking: dict[str, dict[str, Any]] = Field({"mlflow": {}})
    """Observers by name with their parameters; MLflow by default, `{}` for none."""
    plugins: PluginsConfig = PluginsConfig()
    """Plugins that are loaded or required."""
    output_dir: str = "runs/default"
    """Folder for everything the run writes, relative to the working directory."""

    @property
    def reward_labels(self) -> list[str]:
        """Labels of the rewards in metrics and files: names, numbered where they come again: regex, regex-2."""
        return labels_of(self.rewards)


def rewards_of(config: RunConfig) -> list[RewardRef]:
    """Return the reward functions of the evaluation."""
    own = config.evaluation.rewards if config.evaluation is not None else None
    return config.rewards if own is None else own
