"""Offers the built-in rewards: exact, regex, length and math."""

from __future__ import annotations

from grpox import ComponentSpec, hookimpl


@hookimpl
def grpox_rewards() -> tuple[ComponentSpec, ...]:
    """Four rewards that need no model; each reads the text of the completion's last message."""
    return (
        ComponentSpec(
            name="exact",
            target="grpox_rewards.exact:Exact",
            config="grpox_rewards.configs:ExactConfig",
            summary="1 if the completion equals the answer column, else 0",
            formula="1[text = answer]",
            source="grpox",
        ),
        ComponentSpec(
            name="regex",
            target="grpox_rewards.regex:Regex",
            config="grpox_rewards.configs:RegexConfig",
            summary="One score if a regular expression matches the completion, another if not",
            formula="match if found (and the group equals the column, where one is given), else no_match",
            source="grpox; the format reward of DeepSeek-R1, arXiv 2501.12948, is one use",
        ),
        ComponentSpec(
            name="length",
            target="grpox_rewards.length:Length",
            config="grpox_rewards.configs:LengthConfig",
            summary="How near the completion's length is to a target, from -1 to 0",
            formula="max(-1, -|length - target| / target)",
            source="grpox",
        ),
        ComponentSpec(
            name="math",
            target="grpox_rewards.math:Math",
            config="grpox_rewards.configs:MathConfig",
            summary="1 if the completion's final expression equals the answer column, judged by math-verify",
            formula="1[expression(text) = expression(answer)]",
            source="https://github.com/huggingface/Math-Verify",
        ),
    )
