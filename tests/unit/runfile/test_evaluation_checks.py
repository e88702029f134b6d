"""Mistakes in an evaluation, or in a metric named by a key, are reported before a model loads."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.run_checks import refused_quickstart

from grpox.checkpoint.folders import folder_of
from grpox.checkpoint.saver import best_of
from grpox.config import CheckpointConfig
from grpox.errors import Problem
from grpox.runfile.evaluation import of_evaluations, of_steps
from grpox.runfile.load import load_run, resolve_config

ROOT = Path(__file__).parents[3]
SAMPLED = ("evaluation.num_generations=4", "evaluation.temperature=1")
STOPS = ("evaluation.every=5", "evaluation.early_stop.metric={}")


def problem(*overrides: str) -> Problem:
    [found] = refused_quickstart(*overrides)
    assert found.where == "command line"
    return found


EVERY, OWN = "evaluation.every=5", "evaluation.sampling"


@pytest.mark.parametrize(
    ("overrides", "key", "given"),
    [
        ([*SAMPLED, "evaluation.pass_at_k=[1, 5]"], "evaluation.pass_at_k[1]", "5"),
        ([*SAMPLED, "evaluation.pass_at_k=[1, 0]"], "evaluation.pass_at_k[1]", "0"),
        ([*SAMPLED, "evaluation.pass_at_k=[4, 1, 4]"], "evaluation.pass_at_k[2]", "4"),
        ([SAMPLED[0]], "evaluation.temperature", "0 with evaluation.num_generations 4"),
        ([EVERY, f"{OWN}.min_completion_length=9"], f"{OWN}.min_completion_length", "9"),
        ([EVERY, f"{OWN}.stop=['']"], f"{OWN}.stop", ""),
        ([EVERY, f"{OWN}.generation_kwargs={{num_beems: 2}}"], f"{OWN}.generation_kwargs.num_beems", ""),
        ([EVERY, f"{OWN}.top_p=1.5"], f"{OWN}.top_p", "1.5"),
        ([EVERY, f"{OWN}.tempreature=1"], f"{OWN}.tempreature", "1"),
        ([EVERY, "evaluation.early_stop={metric: reward, patience: 0}"], "evaluation.early_stop.patience", "0"),
        (["evaluation.early_stop.metric=accuracy"], "evaluation.early_stop", "evaluation.every 0"),
        (["evaluation=null", "checkpoint.best=evaluation/kl"], "checkpoint.best", "evaluation/kl"),
    ],
)
def test_a_setting_that_cannot_be(overrides: list[str], key: str, given: str) -> None:
    [found] = refused_quickstart(*overrides)
    assert (found.key, found.given) == (key, given)
    load_run("quickstart", ["evaluation.num_generations=4", "evaluation.sampling.temperature=0.5"])


def test_rewards_and_functions_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def near(completions, **_):\n    return [0.0] * len(completions)\n")
    own = f"evaluation.rewards=[math, {{path: '{tmp_path}/mine.py:near'}}]"
    run = load_run("quickstart", [own, "evaluation.accuracy=near"])
    own_keys = [key for key in run.components if key.startswith("evaluation")]
    assert own_keys == ["evaluation.rewards[0]", "evaluation.rewards[1]"]
    found = problem(own, "evaluation.accuracy=exact")
    assert (found.key, found.allowed) == ("evaluation.accuracy", "math, near")
    assert problem("evaluation.rewards=[exatc]", "evaluation.accuracy=null").nearest == "exact"
    run = load_run("quickstart", ["evaluation.rewards=[exact]", "evaluation.rewards.0.ignore_case=true"])
    assert run.components["evaluation.rewards[0]"].config.ignore_case is True  # type: ignore[union-attr]
    # Functions of one's own may log any name but a slip.
    (tmp_path / "mine.py").write_text("def near(completions, **_):\n    return [0.0] * len(completions)\n")
    own = f"rewards=[{{path: '{tmp_path}/mine.py:near'}}]"
    common = (own, "evaluation.accuracy=near", STOPS[0])
    load_run("quickstart", [*common, STOPS[1].format("judge/score"), "checkpoint.best=evaluation/judge/score"])
    assert problem(*common, STOPS[1].format("acuracy")).nearest == "accuracy"
    assert problem(*common, "checkpoint.best=rewards/exact/mean").nearest == "rewards/near/mean"


HELD_OUT = ROOT / "grpox" / "runfile" / "recipes" / "quickstart" / "heldout.jsonl"
SETS = ("evaluation.path=null", f"evaluation.sets.hard={{path: '{HELD_OUT}', split: 'train[:10]'}}")


def test_metrics_that_may_end_a_run_or_choose_its_best_checkpoint() -> None:
    ends = "accuracy evaluation/accuracy reward rewards/exact/mean completions/clipped_ratio exact/odd"
    for metric in ends.split():
        load_run("quickstart", [STOPS[0], STOPS[1].format(metric)])
    best = "reward kl rewards/exact/std sampling/kl evaluation/accuracy exact/odd loss"
    for metric in best.split():
        load_run("quickstart", [f"checkpoint.best={metric}", "checkpoint.best_is=min"])
    for metric in ("hard/accuracy", "evaluation/hard/rewards/exact/mean", "accuracy"):  # of one of several sets
        chosen = f"checkpoint.best=evaluation/{metric.removeprefix('evaluation/')}"
        run = load_run("quickstart", [*SETS, STOPS[0], STOPS[1].format(metric), chosen])
        assert run.config.evaluation is not None
        assert run.config.evaluation.set_paths == {"evaluation.sets.hard.path": str(HELD_OUT)}
    # No run stops by an accuracy that it does not say.
    found = problem(STOPS[0], STOPS[1].format("accuracy"), LENGTH, "evaluation.accuracy=null")
    assert (found.key, found.nearest) == ("evaluation.early_stop.metric", "rewards/length/mean")
    load_run("quickstart", [STOPS[0], STOPS[1].format("accuracy"), LENGTH, "evaluation.accuracy=exact"])
    assert best_of([], CheckpointConfig(best="reward")) is None
    assert best_of([folder_of(Path("run"), 1)], CheckpointConfig()) is None  # none is asked for


@pytest.mark.parametrize(
    ("key", "metric", "near"),
    [
        ("evaluation.early_stop.metric", "acuracy", "accuracy"),
        ("evaluation.early_stop.metric", "eval_reward", "reward"),
        ("evaluation.early_stop.metric", "rewards/exakt/mean", "rewards/exact/mean"),
        ("evaluation.early_stop.metric", "pass_at_8", "pass_at_4"),
        ("evaluation.early_stop.metric", "loss", ""),
        ("checkpoint.best", "accuracy", "evaluation/accuracy"),
        ("checkpoint.best", "eval_accuracy", "evaluation/accuracy"),
        ("checkpoint.best", "evaluation/acuracy", "evaluation/accuracy"),
        ("checkpoint.best", "evaluation/loss", None),
        ("checkpoint.best", "rewards/exakt/mean", "rewards/exact/mean"),
        ("checkpoint.best", "rewrd", "reward"),
    ],
)
def test_a_metric_that_nobody_logs(key: str, metric: str, near: str | None) -> None:
    found = problem(f"{key}={metric}", STOPS[0], *SAMPLED, "evaluation.pass_at_k=[4]")
    assert (found.key, found.given) == (key, metric)
    assert found.nearest == near or (near is None and found.nearest != metric)


LENGTH = "evaluation.rewards=[{name: length, target: 3}, exact]"


@pytest.mark.parametrize(
    ("rewards", "said"),
    [
        ("[exact]", "exact"),
        ("[math, {name: length, target: 3}]", "math"),
        ("[code]", "code"),
        ("[{name: code, partial: true}]", None),
        ("[{name: regex, pattern: a}]", "regex"),
        ("[{name: regex, pattern: a, match: 2}]", None),
        ("[{name: length, target: 3}, exact]", None),  # the first decides
        ("[{path: 'FILE:near'}]", None),
        ("[{path: 'FILE:near', binary: true}]", "near"),
    ],
)
@pytest.mark.parametrize("key", ["rewards", "evaluation.rewards"])
def test_accuracy_is_said_of_rewards_that_are_declared_0_or_1(
    tmp_path: Path, key: str, rewards: str, said: str | None
) -> None:
    (tmp_path / "mine.py").write_text("def near(completions, **_):\n    return [0.0] * len(completions)\n")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2", "tests": "1"}\n' * 64)
    rows = [f"data.path={tmp_path}/rows.jsonl", f"evaluation.path={tmp_path}/rows.jsonl"]
    given = f"{key}={rewards.replace('FILE', str(tmp_path / 'mine.py'))}"
    run = load_run("quickstart", [given, "evaluation.accuracy=null", *rows])
    assert run.config.evaluation is not None
    assert run.config.evaluation.says_accuracy is (said is not None)
    first = run.config.main_metric.removeprefix("evaluation/")
    assert (first == "accuracy") is (said is not None)
    again = resolve_config(run.config, tmp_path, "again").config  # as its record is read
    assert again.main_metric == run.config.main_metric
    best = [given, "evaluation.accuracy=null", *rows, "checkpoint.best=evaluation/accuracy"]
    if said is not None:
        load_run("quickstart", best)
    for name in ("accuracy", "eval_accuracy", *(["evaluation/accuracy"] if said is None else [])):
        assert problem(*best[:-1], f"checkpoint.best={name}").nearest == f"evaluation/{first}"


def documented(heading: str) -> list[str]:
    """The names in the first column of the table of docs/metrics.md that has this heading."""
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    [table, *_] = re.findall(rf"^\| {heading} \|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    names: list[str] = []
    for row in table.splitlines():
        first, *others = re.findall(r"`([^`]+)`", row.split("|")[1])
        folder = first.rpartition("/")[0]
        names += [first, *(f"{folder}/{other}" if folder and "/" not in other else other for other in others)]
    return [name.replace("<f>", "exact").replace("<k>", "4").replace("<phase>", "update") for name in names]


def test_the_metrics_of_the_page_are_known() -> None:
    abstains = "rewards=[{name: exact, on_error: abstain}]"
    run = load_run("quickstart", [*SAMPLED, "evaluation.pass_at_k=[4]", abstains, "environment=lake"])
    evaluations, steps = of_evaluations(run.config, run.components), of_steps(run.config, run.components)
    assert [
        name
        for name in documented("metric of evaluations")
        if not evaluations.has(name) and not name.endswith("...")
    ] == []
    of_step = [name for name in documented("metric") if not name.startswith("system/")]  # those are of machines
    assert [name for name in of_step if not steps.has(name)] == []


@pytest.mark.parametrize(
    ("overrides", "key", "told"),
    [
        ((*SETS, STOPS[0], STOPS[1].format("hrd/accuracy")), "evaluation.early_stop.metric", "hard/accuracy"),
        ((SETS[1],), "evaluation.path", "evaluation.sets"),
        (("evaluation.path=null",), "evaluation.path", "evaluation.sets"),
        ((*SETS, f"evaluation.sets.exact={{path: '{HELD_OUT}'}}"), "evaluation.sets.exact", "on_exact"),
        (
            (*SETS, f"evaluation.sets.accuracy={{path: '{HELD_OUT}'}}"),
            "evaluation.sets.accuracy",
            "on_accuracy",
        ),
        ((*SETS, "evaluation.sets.evaluation={path: x.jsonl}"), "evaluation.sets.evaluation", "on_evaluation"),
        ((*SETS, "evaluation.sets={'a/b': {path: x.jsonl}}"), "evaluation.sets", "letters, digits"),
        ((*SETS, "evaluation.sets.hard.path=heldoud.jsonl"), "evaluation.sets.hard.path", ""),
        ((*SETS, "evaluation.sets.hard.subset=main"), "evaluation.sets.hard.subset", "null"),
        ((*SETS, "evaluation.sets.hard.streaming=true"), "evaluation.sets.hard", ""),
        (
            (*SETS, "evaluation.sets.hard.streaming=true", "evaluation.sets.hard.rows=5"),
            "evaluation.sets.hard.split",
            "streaming: false",
        ),
    ],
)
def test_a_set_that_cannot_be(overrides: tuple[str, ...], key: str, told: str) -> None:
    found = next(each for each in refused_quickstart(*overrides) if each.key == key)
    assert told in f"{found.nearest} {found.allowed}"
