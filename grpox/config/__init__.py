"""The schema of a run file: pydantic models, a module for each section. None imports torch.

What a component takes is its own plugin's config and stays in its `ComponentRef` until a registry checks
it. `evaluation_settings` derives the settings of held-out prompts from those of training.
"""

from grpox.config.component import ComponentRef, RewardRef, labels_of
from grpox.config.data import DataConfig
from grpox.config.deepspeed import DeepSpeedConfig
from grpox.config.evaluation import EarlyStopConfig, EvaluationConfig, EvaluationSamplingConfig
from grpox.config.model import LoraConfig, ModelConfig
from grpox.config.outputs import CheckpointConfig, HubConfig, LoggingConfig
from grpox.config.process import PluginsConfig, WatchdogConfig
from grpox.config.run import RunConfig
from grpox.config.sampling import SamplingConfig
from grpox.config.section import Section
from grpox.config.training import TrainConfig

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
