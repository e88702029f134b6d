"""The planted components by family, with the formula that their author would compare them with."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpox.plugins.load_object import load_object

FOLDER = Path(__file__).parent
FAMILIES = (
    "sign", "formula", "normaliser", "mask", "order", "state", "device", "randomness", "mutation", "swallowed",
    "second",
)  # fmt: skip
"""Files of components with an error."""
CORRECT = ("twins", "trial")

MISSED: Mapping[str, str] = {
    "ShareOfTheLongest": "that a score depends on the other completions of the call is reported only",
    "PointsShared": "that a score depends on the other completions of the call is reported only",
    "LionWithoutInterpolation": "an optimizer is not compared with a reference",
    "NoAnswerIsWrong": "the suite has the same columns in every row, none of them None",
    "Novelty": "that a second call gives other scores is reported only",
    "CountsSteps": "an observer is not told of a resumed run",
    "LengthsOnCpu": "rewards run on the CPU's lists; it shows on a GPU only",
    "HashOfText": "a reward is not called in a second process",
    "ClockSeeded": "that a second call gives other scores is reported only",
    "JudgeDownIsZero": "an expected exception may stand for a score",
    "MissingColumnAbstains": "that all completions abstain is reported only",
    "WriteFailureIgnored": "an expected exception may be caught",
    "BadLinesSkipped": "the suite cannot know how many rows there should be",
    "BadStepsSkipped": "no rule says what a step on NaN gradients does",
}
"""Class that no check finds -> why."""

FOUND: Sequence[tuple[str, str, str]] = (
    ("state/loss/WarmsUpByCalls", "pure", "called twice"),
    ("mutation/loss/DampsByData", "pure", r"inputs\.advantages in place"),
    ("formula/loss/CispoWeightNotDetached", "gradient_is_that_of_its_value", "no method expected_gradient"),
    ("normaliser/loss/GspoOverPositions", "padding", "at the end"),
    ("mask/loss/PrefixByPosition", "padding", "neighbours"),
    ("normaliser/loss/RowsOfTheBatch", "micro_batches_and_ranks", "the core divides"),
    ("normaliser/loss/OwnTokenMean", "rows_are_independent", "by itself"),
    ("sign/loss/AbsoluteAdvantage", "sign", "raises the probability of a token with advantage -1"),
    ("sign/loss/LargerBranch", "sign", "torch.min"),
    ("device/loss/PositionsOnCpu", "device", "mixes"),
    ("second/loss/PairsOfAllGroups", "rows_are_independent", "group 0"),
    ("second/loss/PairsOfAllGroups", "micro_batches_and_ranks", "1 groups"),
    ("state/loss/StepsForgotten", "state", "goes on otherwise than the original"),
    ("state/loss/RestoresDefaults", "state", r"returns another one, at \['width'\]"),
    ("state/advantage/StateOfObjects", "state", r"\['seen'\] is a set"),
    ("second/loss/RunningMeanOfNan", "state", "makes its state NaN for ever"),
    ("order/advantage/GroupsAreNeighbours", "order_of_rows", "by group_ids"),
    ("order/advantage/NumberIsIndex", "names_of_groups", "numbers of groups"),
    ("normaliser/advantage/NoFloor", "groups_of_one_reward", "not all finite"),
    ("mask/advantage/AbstainedIsZero", "abstentions", "without a score"),
    ("formula/advantage/FunctionsAveraged", "weight_of_zero", "weight 0"),
    ("sign/advantage/MeanMinusReward", "direction", "smaller advantage"),
    ("normaliser/advantage/WeightsNormalised", "weights", "abstained from all"),
    ("mask/advantage/UnscoredInTheMean", "unscored_completions", "nobody scored"),
    ("device/advantage/RanksOnCpu", "device", "mixes"),
    ("normaliser/correction/GeometricOverPositions", "padding", "padding"),
    ("normaliser/correction/WeightsOfMeanOne", "rows_are_independent", "by itself"),
    ("sign/correction/TruncateInverted", "direction", "weighs"),
    ("device/correction/WeightsOnCpu", "device", "mixes"),
    ("order/reward/SortedTexts", "alignment", "scores of others"),
    ("second/reward/AnswerOfTheNext", "alignment", "scores of others"),
    ("mutation/optimizer/FreezesBiases", "runs", r"leaves out parameters of shapes \[\(4,\)\]"),
    ("sign/optimizer/SignAscent", "direction", "along the gradient"),
    ("state/optimizer/MomentaElsewhere", "state", "other steps"),
    ("state/scheduler/CountsInAClosure", "restart", "restarted after step 1"),
    ("randomness/dataset/ShuffledRows", "same_rows", "other rows"),
)
"""family/kind/class, a check that finds the error, and what it says."""
METHODS = {
    "per_token": "loss",
    "scale": "advantage",
    "correct": "correction",
    "generate": "generator",
    "load": "dataset",
    "grpox_step_finished": "observer",
}
"""Method -> the kind of component that has it."""


@dataclass(frozen=True)
class Case:
    """A component with an error, or a correct one."""

    name: str
    kind: str
    family: str
    formula: Callable[..., Any] | None
    reduction: Callable[..., float] | None

    @property
    def component(self) -> dict[str, str]:
        """The component as a run file selects it."""
        return {"path": f"{FOLDER / self.family}.py:{self.name}"}


def cases(*families: str) -> Iterator[Case]:
    """All components of these files: what has a name of its own there and is neither private nor imported."""
    for family in families:
        members = load_object(f"{FOLDER / family}.py:__dict__")
        for name, found in members.items():
            if not name.startswith("_") and getattr(found, "__module__", "") == members["__name__"]:
                formula = getattr(found, "formula", None)
                reduction = members["skeletons"].REDUCTIONS.get(formula)
                yield Case(name, _kind(found), family, formula, reduction)


def _kind(component: Any) -> str:
    if hasattr(component, "build"):
        takes_steps = "total_steps" in inspect.signature(component.build).parameters
        return "scheduler" if takes_steps else "optimizer"
    return next((kind for method, kind in METHODS.items() if hasattr(component, method)), "reward")
