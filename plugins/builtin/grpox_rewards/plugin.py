"""The built-in rewards: exact, regex, format, length, soft_overlong, cosine, repetition, math, code,
environment, reward_model, http and judge."""

from __future__ import annotations

from grpox import ComponentSpec, hookimpl
from grpox.contracts import Capability

REWARDS = (
    ComponentSpec(
        name="exact",
        target="grpox_rewards.text:Exact",
        config="grpox_rewards.configs:ExactConfig",
        summary="1 if the completion equals the answer column, else 0",
        formula="1[text = answer]",
        source="grpox",
    ),
    ComponentSpec(
        name="regex",
        target="grpox_rewards.text:Regex",
        config="grpox_rewards.configs:RegexConfig",
        summary="One score if a regular expression matches the completion, else another score",
        formula="match if found (and the group equals the column, if given), else no_match",
        source="grpox; the format reward of DeepSeek-R1, arXiv 2501.12948, is one use",
    ),
    ComponentSpec(
        name="format",
        target="grpox_rewards.text:Format",
        config="grpox_rewards.configs:FormatConfig",
        summary="1 if the completion is <think>...</think> <answer>...</answer> (or other tags), else 0",
        formula="1[text = blocks of the tags, each once and in order]",
        source="DeepSeek-R1, arXiv 2501.12948, section 2.2.2",
    ),
    ComponentSpec(
        name="length",
        target="grpox_rewards.text:Length",
        config="grpox_rewards.configs:LengthConfig",
        summary="Minus the distance of the completion's length from a target, from -1 to 0 or in units",
        formula="relative: max(-1, -|length - target| / target); absolute: -|length - target|",
        source="grpox; absolute is the reward of TRL's tutorials",
    ),
    ComponentSpec(
        name="soft_overlong",
        target="grpox_rewards.text:SoftOverlong",
        config="grpox_rewards.configs:SoftOverlongConfig",
        summary="A penalty for completions near or over a maximum length, from 0 to -1",
        formula="min(0, max(-1, (max_length - buffer - length) / buffer))",
        source="DAPO, arXiv 2503.14476, equation 13",
    ),
    ComponentSpec(
        name="cosine",
        target="grpox_rewards.text:Cosine",
        config="grpox_rewards.configs:CosineConfig",
        summary="Right answers score more the shorter they are, wrong ones the longer they are",
        formula="end + (start - end) (1 + cos(pi length / max_length)) / 2, start and end by correctness",
        source="Demystifying Long Chain-of-Thought Reasoning, arXiv 2502.03373, appendix C.1",
    ),
    ComponentSpec(
        name="repetition",
        target="grpox_rewards.text:Repetition",
        config="grpox_rewards.configs:RepetitionConfig",
        summary="A penalty for n-grams that repeat an earlier one, from 0 to -1",
        formula="distinct n-grams / n-grams - 1",
        source="Demystifying Long Chain-of-Thought Reasoning, arXiv 2502.03373, appendix C.2",
    ),
    ComponentSpec(
        name="math",
        target="grpox_rewards.math:Math",
        config="grpox_rewards.configs:MathConfig",
        summary="1 if the completion's final expression equals the answer column, judged by math-verify",
        formula="1[expression(text) = expression(answer)]",
        source="https://github.com/huggingface/Math-Verify",
    ),
    ComponentSpec(
        name="code",
        target="grpox_rewards.code:Code",
        config="grpox_rewards.configs:CodeConfig",
        summary="1 if the completion's Python code passes the tests of the column, run confined, else 0",
        formula="1[all tests pass], or tests passed / tests",
        source="grpox; unit tests as a reward as in CodeRL, arXiv 2207.01780",
    ),
    ComponentSpec(
        name="environment",
        target="grpox_rewards.text:EnvironmentReward",
        config="grpox_rewards.configs:EnvironmentConfig",
        summary="The reward that an episode's environment gave, or one part of it",
        needs=(Capability.EPISODE_REWARD,),
        formula="weight of the environment * (sum of the parts, or the part)",
        source="grpox",
    ),
    ComponentSpec(
        name="reward_model",
        target="grpox_rewards.reward_model:RewardModel",
        config="grpox_rewards.configs:RewardModelConfig",
        summary="Score of a sequence-classification model for prompt and completion",
        formula="logits[:, 0]",
        source="transformers' AutoModelForSequenceClassification",
    ),
    ComponentSpec(
        name="http",
        target="grpox_rewards.service:Http",
        config="grpox_rewards.configs:HttpConfig",
        summary="Scores of a verifier service, to which prompts and completions are posted as JSON",
        formula="the scores that the service answers",
        source="grpox",
    ),
    ComponentSpec(
        name="judge",
        target="grpox_rewards.judge:Judge",
        config="grpox_rewards.configs:JudgeConfig",
        summary="The score that a language model gives, asked through an OpenAI-compatible service",
        formula="(score - lowest) / (highest - lowest)",
        source="grpox; LLM-as-a-judge as in MT-Bench, arXiv 2306.05685",
    ),
)


@hookimpl
def grpox_rewards() -> tuple[ComponentSpec, ...]:
    """Return the thirteen rewards; text rewards read the text of the model's last message."""
    return REWARDS
