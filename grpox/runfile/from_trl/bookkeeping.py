"""Checkpoints, logs, trackers and the hub."""

from __future__ import annotations

from typing import Any

from grpox.config import RewardRef
from grpox.config.evaluation_settings import PREFIX
from grpox.runfile.from_trl.draft import Draft, whole
from grpox.runfile.from_trl.field import Verdict

_BEST = ("metric_for_best_model", "greater_is_better")
_HUB = ("hub_model_id", "hub_private_repo", "hub_revision", "hub_token", "hub_strategy", "hub_always_push")


def write_bookkeeping(draft: Draft) -> None:
    """Write what a run leaves, and where."""
    _checkpoints(draft)
    _tracking(draft)
    _hub(draft)
    if draft.has("log_completions"):
        every = draft.get("logging_steps") or 10
        steps = whole(every) if isinstance(every, int | float) and every >= 1 else 10
        draft.put("logging.completions_every", steps if draft.get("log_completions") else 0)
    if draft.has("ddp_timeout"):
        draft.put("watchdog.end_after", draft.get("ddp_timeout"))


def _checkpoints(draft: Draft) -> None:
    strategy, steps = draft.get("save_strategy"), draft.get("save_steps")
    if strategy in ("no", False):
        draft.put("checkpoint.every", 0)
        draft.unneeded(("save_steps",), "save_strategy is no")
    elif strategy in ("epoch", "best"):
        draft.tell("save_strategy", Verdict.UNSUPPORTED, "checkpoint.every counts optimizer steps")
    elif draft.has("save_steps") and isinstance(steps, int | float):
        if steps >= 1:
            draft.put("checkpoint.every", whole(steps))
        else:
            draft.tell(
                "save_steps", Verdict.UNSUPPORTED, "checkpoint.every is a number of steps, not a part of them"
            )
    if draft.has("save_total_limit"):
        draft.put("checkpoint.keep", draft.get("save_total_limit"))
    _best(draft)


def _best(draft: Draft) -> None:
    """TRL's metric is one of its evaluation, which is left to be filled in: so is this."""
    if not draft.get("load_best_model_at_end"):
        draft.unneeded(_BEST, "load_best_model_at_end is false")
        return
    if draft.has("greater_is_better"):
        draft.put("checkpoint.best_is", "highest" if draft.get("greater_is_better") else "lowest")
    metric = str(draft.get("metric_for_best_model") or "loss").removeprefix("eval_")
    ours, why = _evaluation_metric(draft, metric), "a metric of the evaluation, which is to be filled in too"
    if ours:
        draft.tell("metric_for_best_model", Verdict.SAME, f"checkpoint.best: {ours}")
    else:
        ours, why = "evaluation/accuracy", f"TRL has {metric}; docs/metrics.md has names"
    if "checkpoint" in draft.values:
        draft.ask("checkpoint.best", ours, why)
    else:
        draft.ask("checkpoint", f"{{best: {ours}}}", why)


def _evaluation_metric(draft: Draft, metric: str) -> str:
    """What the evaluation calls TRL's `metric`, empty where it has no such one."""
    known = metric in ("reward", "reward_std") or metric.startswith("completions/")
    label = metric.removeprefix("rewards/").removesuffix("/mean")
    known |= metric == f"rewards/{label}/mean" and label in _labels(draft)
    return f"{PREFIX}{metric}" if known else ""


def _labels(draft: Draft) -> list[str]:
    """What metrics call the rewards of the draft, but for those of one name."""
    return [RewardRef.model_validate(entry).label for entry in draft.values.get("rewards") or ()]


def _tracking(draft: Draft) -> None:
    given = draft.get("report_to")
    named = [str(name) for name in (given if isinstance(given, list) else [given]) if name is not None]
    parameters: dict[str, Any] = {}
    if draft.has("run_name"):
        parameters["run_name"] = draft.get("run_name")
    if draft.has("project"):
        parameters["experiment"] = draft.get("project")
    if draft.has("report_to") and named in ([], ["none"]):
        draft.put("tracking", {})
        draft.unneeded(("run_name", "project"), "report_to is none")
        return
    others = [name for name in named if name not in ("mlflow", "all", "none")]
    if others:
        told = f"{', '.join(others)}: an observer plugin, to be named in tracking; MLflow in its place"
        draft.tell("report_to", Verdict.UNSUPPORTED, told)
    elif named == ["mlflow"]:
        draft.tell("report_to", Verdict.SAME, "tracking.mlflow")
    if parameters or draft.has("report_to"):
        draft.put("tracking", {"mlflow": parameters})


def _hub(draft: Draft) -> None:
    if not draft.get("push_to_hub"):
        draft.unneeded(_HUB, "push_to_hub is false")
        return
    repo = draft.get("hub_model_id")
    if not isinstance(repo, str) or "/" not in repo:
        draft.ask("hub", f"{{repo: user/{repo or 'name'}}}", "the repository's whole name")
        return
    draft.put("hub.repo", repo)
    if draft.has("hub_private_repo"):
        draft.put("hub.private", draft.get("hub_private_repo"))
    if draft.has("hub_revision"):
        draft.put("hub.revision", draft.get("hub_revision"))
