"""The learning-rate schedules that `train.lr_scheduler_type` names."""

from __future__ import annotations

# The values of transformers.SchedulerType, written out because importing it imports torch; a test compares.
LR_SCHEDULER_TYPES = (
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
    "reduce_lr_on_plateau",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "warmup_stable_decay",
    "greedy",
)
