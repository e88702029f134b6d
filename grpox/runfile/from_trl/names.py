"""What TRL calls otherwise: its names, and the keys of a run file that answer to them."""

from __future__ import annotations

from grpox.runfile.from_trl.grpo_fields import GRPO_FIELDS
from grpox.runfile.from_trl.script_fields import SCRIPT_FIELDS
from grpox.runfile.from_trl.trainer_fields import TRAINER_FIELDS

FIELDS = GRPO_FIELDS | TRAINER_FIELDS | SCRIPT_FIELDS
"""Each field of GRPOConfig and of the YAML file of `trl grpo`, with what answers to it."""

TRL_NAMES = {name: field.key for name, field in FIELDS.items() if field.key}
"""TRL's name -> our key."""
