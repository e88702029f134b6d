"""What a process does before it trains or evaluates: seeds, and libraries that are told to be quiet."""

from __future__ import annotations

import logging
import random
import warnings

import numpy as np
import torch


def seed_libraries(seed: int) -> None:
    """Seed every library that draws numbers in this process."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def quieten() -> None:
    """Libraries' own chatter and bars would bury the run's; warnings stay."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    logging.getLogger("DeepSpeed").addFilter(_is_no_overflow)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")


def _is_no_overflow(record: logging.LogRecord) -> bool:
    """The run tells itself of a step that was not taken, and where it was not finite."""
    return "OVERFLOW!" not in record.getMessage()
