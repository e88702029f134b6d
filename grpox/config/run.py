"""The schema of a whole run file, except for the parameters of components."""

from __future__ import annotations

from typing import Annotated, Any, get_args

from pydantic import BeforeValidator, Field

from grpox.config.alarms import AlarmsConfig, alarms_off
from grpox.config.component import ComponentRef, RewardRef, Section, labels_of
from grpox.config.episodes import EnvironmentRef, Environments, EpisodesConfig
from grpox.config.inputs import DataConfig, ModelConfig
from grpox.config.outputs import (
    CheckpointConfig,
    HubConfig,
    LoggingConfig,
    PluginsConfig,
    RecordConfig,
    WatchdogConfig,
)
from grpox.config.sampling import PREFIX, EvaluationConfig, SamplingConfig
from grpox.config.training import DeepSpeedConfig, TrainConfig

REWARD_OF_MODEL = "reward_model"
"""Name of the reward that scores with a model passed in Python, built as ``Class(config, model=model)``."""
CORRECTION_OF_OTHERS = "token-truncate"
"""Default correction if the generator's log-probabilities or weights differ from the trainer's."""


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
    """Scaler that turns rewards into advantages; ``group`` as in GRPO (arXiv 2402.03300)."""
    loss: ComponentRef = ComponentRef(name="dapo")
    """The policy loss; ``dapo`` (arXiv 2503.14476), also TRL's default, weighs all tokens of a step equally."""
    environment: Environments | None = None
    """Environment that answers the model between its turns, or a list of them; default: each completion is one
    turn."""
    tools: list[str] = Field(default_factory=list)
    """Functions that the model may call, as ``file.py:name`` or ``package.module:name``."""
    episodes: EpisodesConfig = EpisodesConfig()
    """Limits of episodes of several turns."""
    correction: ComponentRef = ComponentRef(name="none")
    """Importance weights that correct the difference between the generator's and the trainer's distribution."""
    train: TrainConfig = TrainConfig()
    """Batches, optimizer and length of the run."""
    sampling: SamplingConfig = SamplingConfig()
    """Settings of sampling: lengths, temperature and filters."""
    deepspeed: DeepSpeedConfig = DeepSpeedConfig()
    """The training engine, DeepSpeed ZeRO-3."""
    evaluation: EvaluationConfig | None = None
    """Evaluation on held-out prompts; default: no evaluation."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints, from which an interrupted run resumes."""
    logging: LoggingConfig = LoggingConfig()
    """Logging of completions and of machine metrics."""
    record: RecordConfig = RecordConfig()
    """Facts about single tokens in the run's folder."""
    alarms: Annotated[AlarmsConfig | None, BeforeValidator(alarms_off)] = AlarmsConfig()
    """Alarms of a run that cannot learn; `off` or null: none."""
    watchdog: WatchdogConfig = WatchdogConfig()
    """Time limits for stalled ranks and lost machines."""
    hub: HubConfig | None = None
    """Push the trained model to the hub; default: keep it only in output_dir."""
    tracking: dict[str, dict[str, Any]] = Field({"mlflow": {}})
    """Observers by name with their parameters; default: MLflow; `{}`: none."""
    plugins: PluginsConfig = PluginsConfig()
    """Plugins that are disabled or required."""
    output_dir: str = "runs/default"
    """Folder for everything that the run writes, relative to the working directory."""

    @property
    def environments(self) -> dict[str, EnvironmentRef]:
        """Environments by key: ``environment``, or ``environment[0]`` and so on."""
        if isinstance(self.environment, list):
            return {f"environment[{place}]": each for place, each in enumerate(self.environment)}
        return {} if self.environment is None else {"environment": self.environment}

    @property
    def has_episodes(self) -> bool:
        """True if completions are episodes with an environment or tools."""
        return self.environment is not None or bool(self.tools)

    @property
    def reward_labels(self) -> list[str]:
        """Labels of the rewards in metrics and files: names, numbered if repeated: regex, regex-2."""
        return labels_of(self.rewards)

    @property
    def main_metric(self) -> str:
        """Metric that tells the result of the run: of its evaluation, else the reward."""
        if self.evaluation is None:
            return "reward"
        first = f"rewards/{labels_of(rewards_of(self))[0]}/mean"
        return PREFIX + ("accuracy" if self.evaluation.says_accuracy else first)


def rewards_of(config: RunConfig) -> list[RewardRef]:
    """Return the reward functions of the evaluation."""
    own = config.evaluation.rewards if config.evaluation is not None else None
    return config.rewards if own is None else own


SECTIONS: dict[str, type[Section]] = {
    name: member
    for name, field in RunConfig.model_fields.items()
    for member in (field.annotation, *get_args(field.annotation))
    if isinstance(member, type) and issubclass(member, Section)
}
"""Key -> model of each section of a run file."""
