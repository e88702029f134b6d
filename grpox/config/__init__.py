"""The schema of a run file: a pydantic model for each section. Nothing here imports torch.

A component's parameters stay in its `ComponentRef` until a registry checks them against the plugin's config.
`sampling` derives the settings of held-out prompts from those of training.
"""

from grpox.config.alarms import AlarmsConfig
from grpox.config.component import ComponentRef, Parameters, RewardRef, Section, labels_of
from grpox.config.episodes import EnvironmentRef, EpisodesConfig, WhenConfig
from grpox.config.inputs import DataConfig, LoraConfig, ModelConfig
from grpox.config.outputs import (
    CheckpointConfig,
    HubConfig,
    LoggingConfig,
    PluginsConfig,
    RecordConfig,
    WatchdogConfig,
)
from grpox.config.run import RunConfig
from grpox.config.sampling import (
    EarlyStopConfig,
    EvaluationConfig,
    EvaluationSamplingConfig,
    EvaluationSetConfig,
    SamplingConfig,
)
from grpox.config.training import AdaptiveEntropyConfig, DeepSpeedConfig, TrainConfig

__all__ = [
    "AdaptiveEntropyConfig",
    "AlarmsConfig",
    "CheckpointConfig",
    "ComponentRef",
    "DataConfig",
    "DeepSpeedConfig",
    "EarlyStopConfig",
    "EnvironmentRef",
    "EpisodesConfig",
    "EvaluationConfig",
    "EvaluationSamplingConfig",
    "EvaluationSetConfig",
    "HubConfig",
    "LoggingConfig",
    "LoraConfig",
    "ModelConfig",
    "Parameters",
    "PluginsConfig",
    "RecordConfig",
    "RewardRef",
    "RunConfig",
    "SamplingConfig",
    "Section",
    "TrainConfig",
    "WatchdogConfig",
    "WhenConfig",
    "labels_of",
]
