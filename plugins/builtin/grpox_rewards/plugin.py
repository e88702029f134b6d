"""Offers the built-in rewards: exact, regex, format, length, soft_overlong, math, code and
reward_model.
"""

from __future__ import annotations

from grpox import ComponentSpec, hookimpl


@hookimpl
def grpox_rewards() -> tuple[ComponentSpec, ...]:
    """Offer eight rewards; text rewards read the text of the completion's last message."""
    return (
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
            name="reward_model",
            target="grpox_rewards.reward_model:RewardModel",
            config="grpox_rewards.configs:RewardModelConfig",
            summary="Score of a sequence-classification model for prompt and completion",
            formula="logits[:, 0]",
            source="transformers' AutoModelForSequenceClassification",
        ),
    )
