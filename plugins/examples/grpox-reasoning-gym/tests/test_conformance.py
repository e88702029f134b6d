"""The checks of `grpox plugins check`: the contract of its kind."""

from grpox.testing import RewardConformance

from grpox_reasoning_gym.config import SourceConfig
from grpox_reasoning_gym.rows import rows

[ROW] = rows(SourceConfig(tasks="chain_sum", size=1))


class TestReasoningGymReward(RewardConformance):
    component = "reasoning-gym"
    completions = (f"So <answer>{ROW['answer']}</answer>.", "<answer>-1</answer>", ROW["answer"], "")
    columns = ROW
