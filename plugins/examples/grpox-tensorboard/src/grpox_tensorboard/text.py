"""Text as TensorBoard shows it: Markdown, in which what a policy wrote must not act as any."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from grpox.contracts import ScoredRollout


def as_code(text: str) -> str:
    """`text` as a block of code, every line indented: no mark in it means anything, a fence included."""
    return "\n".join(f"    {line}" for line in text.splitlines()) or "    "


def completion_text(scored: ScoredRollout) -> str:
    """Prompt and completion, each as it is, and what the completion got."""
    rewards = ", ".join(f"{name} {_number(value)}" for name, value in scored.rewards.items())
    total = f"reward {_number(scored.reward)}, advantage {_number(scored.advantage)}"
    parts = (f"**{total}** ({rewards})", as_code(scored.prompt), "completion:", as_code(scored.completion))
    return "\n\n".join(parts)


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"
