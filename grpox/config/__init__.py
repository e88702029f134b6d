"""The schema of a run file: a pydantic model for each section. Nothing here imports torch.

A component's parameters stay in its `ComponentRef` until a registry checks them against the plugin's config.
`sampling` derives the settings of held-out prompts from those of training.
"""

from grpox.config.alarms import AlarmsConfig as AlarmsConfig
from grpox.config.component import ComponentRef as ComponentRef
from grpox.config.component import Parameters as Parameters
from grpox.config.component import RewardRef as RewardRef
from grpox.config.component import Section as Section
from grpox.config.component import labels_of as labels_of
from grpox.config.episodes import EnvironmentRef as EnvironmentRef
from grpox.config.episodes import EpisodesConfig as EpisodesConfig
from grpox.config.episodes import WhenConfig as WhenConfig
from grpox.config.inputs import DataConfig as DataConfig
from grpox.config.inputs import LoraConfig as LoraConfig
from grpox.config.inputs import ModelConfig as ModelConfig
from grpox.config.outputs import CheckpointConfig as CheckpointConfig
from grpox.config.outputs import HubConfig as HubConfig
from grpox.config.outputs import LoggingConfig as LoggingConfig
from grpox.config.outputs import PluginsConfig as PluginsConfig
from grpox.config.outputs import RecordConfig as RecordConfig
from grpox.config.outputs import WatchdogConfig as WatchdogConfig
from grpox.config.run import RunConfig as RunConfig
from grpox.config.sampling import EarlyStopConfig as EarlyStopConfig
from grpox.config.sampling import EvaluationConfig as EvaluationConfig
from grpox.config.sampling import EvaluationSamplingConfig as EvaluationSamplingConfig
from grpox.config.sampling import EvaluationSetConfig as EvaluationSetConfig
from grpox.config.sampling import SamplingConfig as SamplingConfig
from grpox.config.training import AdaptiveEntropyConfig as AdaptiveEntropyConfig
from grpox.config.training import DeepSpeedConfig as DeepSpeedConfig
from grpox.config.training import TrainConfig as TrainConfig
