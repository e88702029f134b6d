"""The schema of a run file: a pydantic model for each section. Nothing here imports torch.

A component's parameters stay in its `ComponentRef` until a registry checks them against the plugin's config.
`sampling` derives the settings of held-out prompts from those of training.
"""

from grpox.config.component import ComponentRef, Parameters, RewardRef, Section, labels_of
from grpox.config.inputs import DataConfig, LoraConfig, ModelConfig
from grpox.config.outputs import CheckpointConfig, HubConfig, LoggingConfig, PluginsConfig, WatchdogConfig
from grpox.config.run import RunConfig
from grpox.config.sampling import (
    EarlyStopConfig,
    EvaluationConfig,
    EvaluationSamplingConfig,
    SamplingConfig,
)
from grpox.config.training import DeepSpeedConfig, TrainConfig

__all__ = [
    "CheckpointConfig",
    "ComponentRef",
    "DataConfig",
    "DeepSpeedConfig",
    "EarlyStopConfig",
    "EvaluationConfig",
    "EvaluationSamplingConfig",
    "HubConfig",
    "LoggingConfig",
    "LoraConfig",
    "ModelConfig",
    "Parameters",
    "PluginsConfig",
    "RewardRef",
    "RunConfig",
    "SamplingConfig",
    "Section",
    "TrainConfig",
    "WatchdogConfig",
    "labels_of",
]
