"""The schema of a run file: pydantic models, one for each section.

What a component takes is its own plugin's config and stays in its `ComponentRef` until a registry checks
it. `evaluation` derives the settings of held-out prompts from those of training.
"""

from grpox.config.schema import (
    CheckpointConfig,
    ComponentRef,
    DataConfig,
    DeepSpeedConfig,
    EarlyStopConfig,
    EvaluationConfig,
    EvaluationSamplingConfig,
    HubConfig,
    LoggingConfig,
    LoraConfig,
    ModelConfig,
    PluginsConfig,
    RewardRef,
    RunConfig,
    SamplingConfig,
    Section,
    TrainConfig,
    WatchdogConfig,
    labels_of,
)

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
    "PluginsConfig",
    "RewardRef",
    "RunConfig",
    "SamplingConfig",
    "Section",
    "TrainConfig",
    "WatchdogConfig",
    "labels_of",
]
