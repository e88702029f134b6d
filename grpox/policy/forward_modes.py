"""Ways to log-probabilities in a model's forward pass: by all its logits, or with less work."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ForwardMode:
    """Savings in a model's forward pass."""

    chunked: bool = False
    """The head is asked for chosen log-probabilities in place of all logits."""
    shared_width: int = 0
    """The hidden size, where sequences can share their prompt in a row; 0: they cannot."""
    packed: bool = False
    """The sequences of a micro-batch lie in one row, without padding between them."""
    failures: tuple[str, ...] = field(default=(), compare=False)
    """Errors that the trials of other ways raised, for the user."""

    def __str__(self) -> str:
        """The key of the run file that asks for it."""
        way = "packing" if self.packed else "prefix_sharing" if self.shared_width else "chunked_logprobs"
        return f"train.{way}"


FULL_LOGITS = ForwardMode()
