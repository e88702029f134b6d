"""The learning-rate schedules that `train.lr_scheduler_type` names."""

from __future__ import annotations

# Together the values of transformers.SchedulerType, written out because importing it imports torch; a test
# compares them.
LR_SCHEDULER_TYPES = (
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
)
"""Those that need no more than the number of steps."""

UNSUPPORTED_SCHEDULER_TYPES = {
    "reduce_lr_on_plateau": "follows an evaluation metric",
    "greedy": "follows an evaluation metric",
    "cosine_with_min_lr": "needs min_lr",
    "cosine_warmup_with_min_lr": "needs min_lr",
    "warmup_stable_decay": "needs num_decay_steps",
}
"""Those that need what `train` has no key for, and why: train.scheduler takes a plugin for them."""
