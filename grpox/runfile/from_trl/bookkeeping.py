"""Checkpoints, logs, trackers and the hub."""

from __future__ import annotations

from grpox.config import RewardRef
from grpox.config.evaluation_settings import PREFIX
from grpox.runfile.from_trl.draft import Draft, whole
from grpox.runfile.from_trl.fields import Verdict


def write_bookkeeping(draft: Draft) -> None:
    """Write what a run leaves, and where."""
    _checkpoints(draft)
    _tracking(draft)
    _hub(draft)
    if draft.has("log_completions"):
        every = draft.get("logging_steps") or 10
        steps = whole(every) if isinstance(every, int | float) and every >= 1 else 10
        draft.put("logging.completions_every", steps if draft.get("log_completions") else 0)
    draft.copy("ddp_timeout")


def _checkpoints(draft: Draft) -> None:
    strategy, steps = draft.get("save_strategy"), draft.get("save_steps")
    if strategy in ("no", False):
        draft.put("checkpoint.every", 0)
        draft.unneeded(("save_steps",), "save_strategy is no")
    elif strategy in ("epoch", "best"):
        draft.explain("save_strategy", Verdict.UNSUPPORTED, "checkpoint.every counts optimizer steps")
    elif draft.has("save_steps") and isinstance(steps, int | float):
        if steps >= 1:
            draft.put("checkpoint.every", whole(steps))
        else:
            why = "checkpoint.every is a number of steps, not a part of them"
            draft.explain("save_steps", Verdict.UNSUPPORTED, why)
    draft.copy("save_total_limit")
    _best(draft)


def _best(draft: Draft) -> None:
    """TRL's metric is one of its evaluation, which is left to be filled in: so is this."""
    if not draft.get("load_best_model_at_end"):
        return
    if draft.has("greater_is_better"):
        draft.put("checkpoint.best_is", "highest" if draft.get("greater_is_better") else "lowest")
    metric = str(draft.get("metric_for_best_model") or "loss").removeprefix("eval_")
    ours, why = _evaluation_metric(draft, metric), "a metric of the evaluation, which is to be filled in too"
    if ours:
        draft.explain("metric_for_best_model", Verdict.SAME, f"checkpoint.best: {ours}")
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
    parameters = draft.given_of("mlflow")
    if draft.has("report_to") and named in ([], ["none"]):
        draft.put("tracking", {})
        draft.unneeded(("run_name", "project"), "report_to is none")
        return
    others = [name for name in named if name not in ("mlflow", "all", "none")]
    if others:
        message = f"{', '.join(others)}: an observer plugin, to be named in tracking; MLflow in its place"
        draft.explain("report_to", Verdict.UNSUPPORTED, message)
    elif named == ["mlflow"]:
        draft.explain("report_to", Verdict.SAME, "tracking.mlflow")
    if parameters or draft.has("report_to"):
        draft.put("tracking", {"mlflow": parameters})


def _hub(draft: Draft) -> None:
    if not draft.get("push_to_hub"):
        return
    repo = draft.get("hub_model_id")
    if not isinstance(repo, str) or "/" not in repo:
        draft.ask("hub", f"{{repo: user/{repo or 'name'}}}", "the repository's whole name")
        return
    draft.copy("hub_model_id", "hub_private_repo", "hub_revision")
