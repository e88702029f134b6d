"""Progress of a run: the state of its loop, its form in checkpoints, and the batch sizes that fit to it."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass, field
from math import gcd
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from grpox.checkpoint.folders import write_text
from grpox.config import TrainConfig
from grpox.config.sampling import evaluation_in
from grpox.data.schedule import BatchPlan, PromptCursor
from grpox.errors import ConfigError, Problem, describe
from grpox.errors.formatting import pluralize
from grpox.observing.alarms import Alarms, AlarmsState
from grpox.observing.control import ControlState
from grpox.observing.early_stop import EarlyStop, EarlyStopState
from grpox.policy.batch import Sample
from grpox.rollout.sampler import PrefetchedBatch
from grpox.runfile.lock.model import Lock
from grpox.runtime.files import parse_json, read_small
from grpox.update.entropy_control import EntropyControl, EntropyControlState
from grpox.update.nonfinite import SkippedSteps

PROGRESS = "run.json"
SPLITS = (
    "train.per_device_train_batch_size",
    "train.gradient_accumulation_steps",
    "train.steps_per_generation",
    "train.generation_batch_size",
)
"""Keys that say how batches are split over ranks and micro-batches."""


@dataclass
class TrainingState:
    """State of the loop; the trainer owns it, and its parts advance it."""

    samples: dict[tuple[int, int], Sample] = field(default_factory=dict)
    """This rank's samples of the generation batches in use, by generation and row."""
    prefetched: dict[int, PrefetchedBatch] = field(default_factory=dict)
    """Generation batches that are sampled while the policy is updated; none at max_staleness 0."""
    cursor: PromptCursor | None = None
    """Chooses the prompts of a generation batch in place of the schedule, with dynamic sampling."""
    early_stop: EarlyStop | None = None
    entropy_control: EntropyControl | None = None
    skipped: SkippedSteps = field(default_factory=SkippedSteps)
    alarms: Alarms | None = None
    """Alarms of a run that cannot learn; they see the steps of rank 0 only."""
    control: ControlState = field(default_factory=ControlState)
    """Effects of observers on the run."""
    num_tokens: int = 0
    """Tokens of prompts and completions so far."""
    losses: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """Sum of the losses of the steps so far, and their number."""
    evaluation_before: dict[str, float] = field(default_factory=dict)
    """Metrics of the evaluation before the first step."""
    evaluation: dict[str, float] = field(default_factory=dict)
    """Metrics of the last evaluation; after a resume, those in the checkpoint."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the last step, those of its evaluation below ``evaluation/``; on rank 0."""
    seconds_before: float = 0.0
    """Seconds of training before the resumed checkpoint."""
    started: float = field(default_factory=time.perf_counter)

    @property
    def seconds(self) -> float:
        """Seconds of training so far, those before a resumed checkpoint included."""
        return self.seconds_before + time.perf_counter() - self.started


Count = Annotated[int, Field(ge=0, le=1 << 53)]


class Progress(BaseModel):
    """Progress of a run in a checkpoint, written by rank 0, read by all."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True, ser_json_inf_nan="strings")

    step: Count
    """Optimizer steps done: the version of the weights."""
    world_size: int = Field(ge=1, le=1 << 16)
    num_tokens: Count
    """Tokens of prompts and completions so far."""
    seconds: float = Field(ge=0, allow_inf_nan=False)
    """Seconds of training so far."""
    evaluation_before: dict[str, float]
    """Metrics of the evaluation before the first step; empty without one."""
    metrics: dict[str, float]
    """Metrics of this step, by which the best checkpoint is chosen."""
    metrics_bytes: Count
    """Size of metrics.jsonl."""
    prompts_drawn: Count = 0
    """Position in the order of prompts, with dynamic sampling; else it follows from the step."""
    early_stop: EarlyStopState | None = None
    """State of `evaluation.early_stop`; None where the run has none."""
    entropy_control: EntropyControlState | None = None
    """State of `train.adaptive_entropy`; None where the run has none."""
    losses: list[float] = Field(default=[0.0, 0.0], min_length=2, max_length=2)
    """Sum of the losses of the steps so far, and their number."""
    alarms: AlarmsState | None = None
    """State of the alarms; None where they are off."""
    skipped_steps: Count = 0
    """Steps that were skipped because they were not finite."""
    skipped_in_a_row: Count = 0
    """Skipped steps since the last applied one."""
    hyperparameters: dict[str, float] = {}
    """Hyperparameters that observers have changed."""
    stop_reason: str = ""
    """The reason why an observer ended the run."""
    config: dict[str, Any]
    """The resolved config."""
    data: dict[str, str]
    """Key of the run file -> fingerprint of the file or folder it names."""
    lock: Lock
    """Code of the run."""

    def write(self, folder: Path) -> None:
        """Write the progress into `folder` and flush it to disk."""
        write_text(folder / PROGRESS, self.model_dump_json(indent=1))

    @classmethod
    def read(cls, folder: Path) -> Progress:
        """Read the progress of the checkpoint in `folder`; raises ValueError if it cannot be read."""
        try:
            progress = cls.model_validate(parse_json(read_small(folder / PROGRESS)))
            plan_of(progress.config, progress.world_size)
        except (OSError, ValueError, KeyError, ConfigError) as error:
            raise ValueError(f"{PROGRESS} cannot be read: {describe(error)}") from error
        return progress

    def restore(self, state: TrainingState) -> None:
        """Restore `state`, except each rank's own part."""
        state.evaluation, state.seconds_before = evaluation_in(self.metrics), self.seconds
        for key, (owner, name) in _places(state).items():
            value = copy.deepcopy(getattr(self, key))
            if hasattr(owner, "restore"):
                owner.restore(value)
            elif value is not None:
                setattr(owner, name, value)


def saved_fields(state: TrainingState) -> dict[str, Any]:
    """Return the fields of `Progress` that are the state of the loop, as copies."""
    own = {key: getattr(owner, name) for key, (owner, name) in _places(state).items()}
    return copy.deepcopy({**own, "seconds": state.seconds, "metrics": state.metrics})


def _places(state: TrainingState) -> dict[str, tuple[Any, str]]:
    """Return field of `Progress` -> object and attribute that hold it, without the parts that a run lacks."""
    places = {
        "num_tokens": (state, "num_tokens"),
        "evaluation_before": (state, "evaluation_before"),
        "losses": (state, "losses"),
        "skipped_steps": (state.skipped, "total"),
        "skipped_in_a_row": (state.skipped, "in_a_row"),
        "hyperparameters": (state.control, "changed"),
        "stop_reason": (state.control, "stop_reason"),
        "prompts_drawn": (state.cursor, "position"),
        "early_stop": (state.early_stop, "state"),
        "entropy_control": (state.entropy_control, "state"),
        "alarms": (state.alarms, "state"),
    }
    return {key: place for key, place in places.items() if place[0] is not None}


def plan_of(config: dict[str, Any], world_size: int) -> BatchPlan:
    """Return the batch plan of a config in a checkpoint."""
    return BatchPlan.from_config(TrainConfig.model_validate(config["train"]), world_size)


def same_steps(saved: BatchPlan, plan: BatchPlan) -> bool:
    """Tell whether every optimizer step has the same rows under both plans, however they are split."""
    names = ("train_batch_size", "generation_batch_size", "num_generations", "num_iterations")
    return all(getattr(saved, name) == getattr(plan, name) for name in names)


def other_batches(saved: BatchPlan, plan: BatchPlan) -> Problem:
    """Describe why a run with `plan` cannot continue one with `saved`, and which settings can."""
    ranks = pluralize(plan.world_size, "rank")
    what = f"{ranks} would make other batches than the {saved.world_size} of the checkpoint"
    if saved.world_size == plan.world_size:
        what = "the batches are not those of the checkpoint"
    given, wanted = (
        f"{each.train_batch_size} completions a step, {each.generation_batch_size} a generation batch, "
        f"groups of {each.num_generations}, {each.num_iterations} iterations"
        for each in (plan, saved)
    )
    allowed = f"{wanted}: {fitting(saved, plan.world_size)}"
    return Problem(what, " and ".join(SPLITS[:3]), given=given, allowed=allowed)


def fitting(saved: BatchPlan, world_size: int) -> str:
    """Return overrides of the command line by which `world_size` ranks take the steps of `saved`."""
    both = gcd(saved.train_batch_size, saved.generation_batch_size)
    if both % world_size:
        sizes = [size for size in range(1, both + 1) if both % size == 0]
        return f"{world_size} ranks cannot share them evenly; {', '.join(map(str, sizes[:12]))} can"
    most = both // world_size
    # The largest micro-batch that is known to fit into memory.
    rows = max(size for size in range(1, saved.per_device_train_batch_size + 1) if most % size == 0)
    sizes = [
        rows,
        *(size // (rows * world_size) for size in (saved.train_batch_size, saved.generation_batch_size)),
    ]
    return " ".join([*map("{}={}".format, SPLITS[:3], sizes), f"{SPLITS[3]}=null"])
