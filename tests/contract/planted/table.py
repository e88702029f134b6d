"""The planted components by family and kind, with the formula that their author would compare them with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contract.planted import references as paper

FOLDER = Path(__file__).parent

GRPO, DAPO = paper.clipped(0.2, 0.2), paper.clipped(0.2, 0.28)
GSPO, WIDE_GSPO = paper.gspo(3e-4, 4e-4), paper.gspo(0.2, 0.2)
GRADIENT, PREFIX = paper.capped(float("inf")), paper.prefix(0.2, 0.2)
CISPO, SAPO = paper.capped(5.0), paper.sapo(1.0, 1.05)
TIS, ICEPOP = paper.token_truncate(2.0), paper.icepop(0.5, 5.0)
SEQUENCE_TIS = paper.sequence_truncate(2.0)

REDUCTIONS: Mapping[Any, Callable[..., float]] = {
    **dict.fromkeys((DAPO, CISPO), paper.token_mean),
    **dict.fromkeys((GSPO, WIDE_GSPO, SAPO, paper.pairwise), paper.sequence_mean),
}
"""Formula of a loss -> the reduction of its paper, where the components here have no other on purpose."""

PLANTED: Mapping[str, Mapping[str, Mapping[str, Callable[..., Any] | None]]] = {
    "sign": {
        "loss": {
            "LargerBranch": GRPO,
            "ObjectiveNotNegated": GRPO,
            "InverseRatio": DAPO,
            "CispoNotNegated": CISPO,
            "SapoGateReversed": SAPO,
            "AbsoluteAdvantage": paper.capped(5.0),
            "EntropyPunished": paper.with_entropy,
            "ReferenceDistanceNegated": paper.with_reference,
        },
        "advantage": {
            "MeanMinusReward": paper.centred,
            "LeaveOneOutReversed": paper.leave_one_out,
            "BestRankedLowest": paper.ranked,
        },
        "correction": {"TruncateInverted": TIS, "IcepopBandInverted": ICEPOP},
        "reward": {"OverlongRewarded": paper.overlong},
        "optimizer": {"SignAscent": None},
        "scheduler": {"RisingCosine": paper.cosine},
    },
    "formula": {
        "loss": {
            "GspoSum": GSPO,
            "GspoArithmetic": WIDE_GSPO,
            "DapoRangeExchanged": DAPO,
            "ClipsTheLogRatio": GRPO,
            "ClipsOnly": GRPO,
            "SapoTemperaturesExchanged": SAPO,
            "SapoWithoutScale": SAPO,
            "CispoWithFloor": CISPO,
            "CispoWeightNotDetached": CISPO,
            "GspoTokenWithoutToken": GSPO,
            "GmpoBothSides": paper.gmpo(0.4),
        },
        "advantage": {
            "VarianceForDeviation": paper.standardised,
            "LeaveNoneOut": paper.leave_one_out,
            "FunctionsAveraged": paper.centred,
        },
        "correction": {"SequenceByMean": SEQUENCE_TIS, "CapOnTheLog": TIS},
        "reward": {"ExactWithin": paper.exact, "OverlongByMaxLength": paper.overlong},
        "optimizer": {"LionWithoutInterpolation": None},
        "scheduler": {"HalfACosine": paper.cosine},
    },
    "normaliser": {
        "loss": {
            "OwnTokenMean": DAPO,
            "PaddedLength": GRPO,
            "RowsOfTheBatch": GRPO,
            "GspoOverPositions": GSPO,
            "LengthTwice": GRPO,
            "WhitensTheMicroBatch": None,
            "DapoBySequence": DAPO,
            "SelfNormalisedRatios": GRADIENT,
        },
        "advantage": {
            "NoFloor": paper.standardised,
            "BatchStdOfPlaceholders": None,
            "GroupSizeOfTheFirst": paper.leave_one_out,
            "WeightsNormalised": paper.centred,
        },
        "correction": {"GeometricOverPositions": None, "WeightsOfMeanOne": TIS},
        "reward": {"ShareOfTheLongest": None},
    },
    "mask": {
        "loss": {
            "RatioOfPadding": None,
            "ZeroIsPadding": WIDE_GSPO,
            "LastColumn": None,
            "NoHoles": WIDE_GSPO,
            "PrefixByPosition": None,
            "LargestOfAll": None,
            "FirstColumnSkipped": DAPO,
        },
        "advantage": {
            "AbstainedIsZero": paper.centred,
            "AnyAbstentionDrops": paper.centred,
            "UnscoredInTheMean": paper.centred,
        },
        "correction": {"SumsPadding": SEQUENCE_TIS, "WorstOfTheWidth": None},
        "reward": {"EmptySkipped": paper.exact, "NoAnswerIsWrong": None},
        "generator": {"EndCut": None},
    },
    "order": {
        "loss": {
            "SortedByLength": WIDE_GSPO,
            "ShiftedOld": DAPO,
            "SuffixForPrefix": PREFIX,
            "NeighbourAdvantage": GRADIENT,
            "FlattenedAndRefilled": GRADIENT,
            "TokensByRatio": paper.capped(3.0),
        },
        "advantage": {
            "GroupsAreNeighbours": paper.centred,
            "MeansRepeated": paper.centred,
            "PlacesForRanks": None,
            "NumberIsIndex": paper.centred,
        },
        "correction": {"WeightsByRatio": TIS},
        "reward": {"EqualsOnce": None, "SortedTexts": None},
        "generator": {"LogprobsShifted": None},
    },
    "state": {
        "loss": {
            "RunningBaseline": None,
            "WarmsUpByCalls": None,
            "ClipForgotten": None,
            "StepsForgotten": None,
            "RestoresDefaults": None,
            "RememberedMask": DAPO,
        },
        "advantage": {"RunningStdForgotten": None, "FirstBatchMeans": paper.centred, "StateOfObjects": None},
        "correction": {"CapByOwnSteps": None, "CapByCalls": None},
        "reward": {"Novelty": None, "TextsOnTheObject": None},
        "observer": {"SharedHistory": None, "CountsSteps": None},
        "optimizer": {"MomentaElsewhere": None},
        "scheduler": {"CountsInAClosure": paper.linear},
    },
    "device": {
        "loss": {
            "PositionsOnCpu": None,
            "SumsOnCpu": GSPO,
            "BoundsOnCpu": GRPO,
            "ThroughNumpy": CISPO,
            "PenaltyOnCpu": paper.capped(2.0),
        },
        "advantage": {"GroupTableOnCpu": paper.centred, "RanksOnCpu": paper.ranked},
        "correction": {"WeightsOnCpu": SEQUENCE_TIS},
        "reward": {"LengthsOnCpu": None},
        "optimizer": {"MomentumOnCpu": None},
    },
    "randomness": {
        "loss": {"TokenDropout": DAPO, "NumpyNoise": GRADIENT, "FreshGenerator": GRPO},
        "advantage": {"TiesByChance": None, "RandomPartner": None},
        "correction": {"RejectionSampling": None},
        "reward": {"HashOfText": None, "ClockSeeded": None},
        "dataset": {"ShuffledRows": None},
        "optimizer": {"LangevinUnseeded": None},
    },
    "mutation": {
        "loss": {
            "ClampsAdvantages": DAPO,
            "SubtractsFromOld": GRPO,
            "NarrowsTheMask": GRADIENT,
            "DampsByData": GRADIENT,
            "DampsTheGradient": GRPO,
        },
        "correction": {"SubtractsInPlace": TIS, "MaskReturned": ICEPOP, "FillsUnknown": TIS},
        "generator": {"WeightsAliased": None},
        "optimizer": {"FreezesBiases": None},
        "scheduler": {"HalvesTheRate": paper.linear},
    },
    "swallowed": {
        "loss": {
            "NanIsZero": DAPO,
            "BadRowsSkipped": GRPO,
            "ReplacesRatios": GRADIENT,
            "AnyErrorIsZero": None,
            "WithoutReference": paper.with_reference,
        },
        "advantage": {"NanAdvantageIsZero": paper.standardised, "TooSmallIsZero": paper.centred},
        "correction": {"InfiniteIsOne": TIS},
        "reward": {"JudgeDownIsZero": None, "MissingColumnAbstains": None},
        "generator": {"LogprobsInvented": None},
        "observer": {"WriteFailureIgnored": None},
        "dataset": {"BadLinesSkipped": None},
        "optimizer": {"BadStepsSkipped": None},
    },
    "second": {
        "loss": {
            "GspoLengthPlusOne": WIDE_GSPO,
            "DualClipForGood": paper.dual_clipped,
            "UnclippedBranchDetached": GRPO,
            "HalfThePenalty": paper.with_reference,
            "DiscountByPlace": None,
            "PairsOfAllGroups": None,
            "AbstentionIsNan": None,
            "TaperOfTheGood": paper.topr_gradient,
            "EntropyByLength": paper.with_entropy,
            "ColumnOfTheNext": None,
            "NeverCorrects": None,
            "ThousandFold": GRADIENT,
            "LengthOfUncertain": WIDE_GSPO,
            "CapShrinksByCalls": None,
            "RunningMeanOfNan": None,
        },
        "advantage": {
            "SpreadOfTheBatch": paper.standardised,
            "OthersOverAll": paper.leave_one_out,
            "PopulationDeviation": paper.standardised,
            "MeanOfTheBatch": paper.centred,
            "GroupsModulo": None,
            "FirstTurnOfTheLast": None,
        },
        "correction": {"FloorForCap": TIS, "RootOfTheRatio": TIS, "LastPosition": None, "WeighsNothing": None},
        "reward": {"RunningScore": None, "AnswerOfTheNext": None, "PointsShared": None},
        "optimizer": {"DecayGrows": None, "StepsOfParameters": None, "NormOfParameter": None},
        "scheduler": {"TwiceAsFast": None},
    },
}
"""Family -> kind -> class -> the formula that its author would compare it with, None where there is none."""


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

TWINS: Mapping[str, Mapping[str, Callable[..., Any] | None]] = {
    "loss": {
        "Grpo": GRPO,
        "Dapo": DAPO,
        "Gspo": GSPO,
        "GspoToken": paper.gspo_token_gradient(0.2, 0.2),
        "Gmpo": paper.gmpo(0.4),
        "Sapo": SAPO,
        "Cispo": CISPO,
        "PolicyGradient": GRADIENT,
        "TwoSided": None,
        "PrefixRatio": PREFIX,
        "FadingPositions": None,
        "AdaptiveClip": GRPO,
        "ByStep": None,
        "EntropyBonus": paper.with_entropy,
        "ReferencePenalty": paper.with_reference,
    },
    "advantage": {
        "Centred": paper.centred,
        "LeaveOneOut": paper.leave_one_out,
        "Standardised": paper.standardised,
        "Ranked": paper.ranked,
        "RunningStd": None,
    },
    "correction": {"Truncate": TIS, "Icepop": ICEPOP, "TruncateSequence": SEQUENCE_TIS, "CapByStep": None},
    "reward": {"Exact": paper.exact, "Overlong": paper.overlong, "JudgeInThreads": None, "awaited": None},
    "observer": {"History": None},
    "optimizer": {"Lion": None},
    "scheduler": {"Cosine": paper.cosine},
    "dataset": {"Doubles": None},
}
"""Kind -> correct class -> its formula."""

TRIAL: Mapping[str, Mapping[str, Callable[..., Any] | None]] = {
    "loss": {"QuantileClip": None, "RewardWeighted": None, "PairsOfAGroup": paper.pairwise},
    "advantage": {"RunningStd": None, "QuantileBaseline": None, "ByDifficulty": None, "RewardToGo": None},
    "correction": {"SequenceCap": None},
    "reward": {"Digits": None, "close": None},
    "observer": {"Patience": None, "TargetKl": None},
    "generator": {"AsksAgain": None},
    "scheduler": {"Restarts": None},
}
"""Kind -> correct class of trial.py -> its formula."""


@dataclass(frozen=True)
class Case:
    """A component with an error, or a correct one."""

    name: str
    kind: str
    family: str
    """The module: a family of errors, ``twins`` or ``trial``."""
    reference: Callable[..., Any] | None

    @property
    def component(self) -> dict[str, str]:
        """The component as a run file selects it."""
        return {"path": f"{FOLDER / self.family}.py:{self.name}"}


def planted() -> Iterator[Case]:
    """All components with an error."""
    for family, kinds in PLANTED.items():
        yield from _cases(family, kinds)


def twins() -> Iterator[Case]:
    """All correct components."""
    yield from _cases("twins", TWINS)
    yield from _cases("trial", TRIAL)


def _cases(family: str, kinds: Mapping[str, Mapping[str, Any]]) -> Iterator[Case]:
    for kind, names in kinds.items():
        for name, reference in names.items():
            yield Case(name, kind, family, reference)
