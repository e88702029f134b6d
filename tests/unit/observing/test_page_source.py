"""The page's answers about a run's metrics and outcome, from files that a run is still writing."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
from support.watched_runs import append_metrics, metrics_line, write_record

from grpox.errors.formatting import duration
from grpox.observing.page.columns import decimate
from grpox.observing.page.source import RunSource
from grpox.runtime.run_lock import hold


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_record(tmp_path / "run")


def series(source: RunSource, name: str, **parameters: int) -> list[list[float | None]]:
    curve: list[list[float | None]] = source.metrics(**parameters)["series"][name]
    return curve


def test_half_a_line_waits_for_its_rest_and_since_returns_only_what_is_new(folder: Path) -> None:
    source = RunSource(folder)
    second = metrics_line(2, {"reward": 0.5})
    append_metrics(folder, metrics_line(1, {"reward": 0.25, "loss": 1.0}), second[:20])
    first = source.metrics()
    assert first["series"]["reward"] == [[1], [0.25]]
    append_metrics(folder, second[20:])
    new = source.metrics(since=first["position"])
    assert new["series"] == {"reward": [[2], [0.5]], "loss": [[], []]}
    reward = next(each for each in new["names"] if each["name"] == "reward")
    assert (reward["first"], reward["last"], reward["min"]) == (0.25, 0.5, 0.25)  # of the whole run
    assert source.run()["problems"] == []


def test_of_a_repeated_step_the_last_value_counts(folder: Path) -> None:
    source = RunSource(folder)
    append_metrics(folder, *(metrics_line(step, {"reward": step / 4}) for step in (1, 2, 3)))
    source.run()
    append_metrics(folder, metrics_line(2, {"reward": 8.0}), metrics_line(3, {"reward": 9.0}))
    assert series(source, "reward") == [[1, 2, 3], [0.25, 8, 9]]
    assert series(source, "reward", first=2, last=2) == [[2], [8]]


@pytest.mark.parametrize("after", [1, 5])
def test_a_resumed_run_that_cut_the_file_is_read_again(folder: Path, after: int) -> None:
    """The new file may be shorter than the old one, or longer by the time that it is looked at."""
    source = RunSource(folder)
    append_metrics(folder, *(metrics_line(step, {"reward": 0.5}) for step in (1, 2, 3)))
    before = source.metrics()
    (folder / "metrics.jsonl").write_text(metrics_line(1, {"reward": 0.5}))
    append_metrics(folder, *(metrics_line(step, {"reward": 0.75}) for step in range(2, 2 + after)))
    answer = source.metrics(since=before["position"], generation=before["generation"])
    assert answer["generation"] == before["generation"] + 1
    assert answer["series"]["reward"] == [list(range(1, 2 + after)), [0.5] + [0.75] * after]


def test_a_new_folder_is_a_run_that_begins_and_a_removed_one_has_ended(tmp_path: Path) -> None:
    later = tmp_path / "later"
    source = RunSource(later)
    assert (source.run()["status"], source.metrics()["names"]) == ("running", [])
    write_record(later)
    assert source.run()["status"] == "unfinished"
    with hold(later):
        assert source.run()["status"] == "running"
    append_metrics(later, metrics_line(1, {"reward": 0.5}))
    source.run()
    later.rename(tmp_path / "moved")
    told = source.run()
    assert told["status"] == "unfinished"
    assert told["problems"] == ["the run's folder no longer exists: it was removed or renamed"]


def test_outcome_and_components(folder: Path) -> None:
    append_metrics(
        folder,
        metrics_line(0, {"accuracy": 0.1}, "evaluation"),
        metrics_line(1, {"reward": 0.25, "step_time": 2.0, "num_tokens": 1000}),
        metrics_line(2, {"reward": 0.5, "num_tokens": 1234567}),
        metrics_line(2, {"accuracy": 0.33149}, "evaluation"),
    )
    source = RunSource(folder)
    with hold(folder):
        run = source.run()
    assert (run["step"], run["steps"], run["seconds_left"]) == (2, 10, 8.0)  # a second a step
    assert run["tiles"][0] == ["accuracy", "0.1 → 0.331", "before training and at step 2"]
    assert run["components"] == [["reward", "exact", "weight: 1"]]
    assert "hf_aaaaaaaaaaaa" not in json.dumps(run)
    assert [rank["rank"] for rank in run["ranks"]] == [0, 1]
    before = run["version"]
    (folder / "failure.json").write_text(json.dumps({"error": "RunFailed: no http://me:secret@host"}))
    run = source.run()
    assert (run["status"], run["error"]) == ("failed", "RunFailed: no http://me:***@host")
    assert run["version"] != before
    assert source.run()["version"] == run["version"]
    assert run["stopped_early"] == ""
    stopped = {"stopped_early": {"step": 2, "reason": "enough"}, "steps": 2, "train_seconds": 3725}
    (folder / "summary.json").write_text(json.dumps(stopped))
    run = source.run()  # it was resumed after the failure
    assert (run["status"], run["stopped_early"]) == ("finished", "after step 2: enough")
    tiles = {name: value for name, value, _ in run["tiles"]}
    assert [*tiles] == ["accuracy", "reward", "steps", "time", "tokens"]
    assert [*tiles.values()][1:] == ["0.25 → 0.5", "2", "1 h 02 min", "1,234,567"]
    assert (run["versions"], run["git_commit"]) == ({"grpox": "0.1.0"}, "abc")
    (accuracy,) = (each for each in source.metrics()["names"] if each["name"] == "evaluation/accuracy")
    assert [accuracy[key] for key in ("first", "last", "min", "max")] == [0.1, 0.33149, 0.1, 0.33149]
    text = "evaluation: {path: h.jsonl, rewards: [{name: math, column: gold}]}\nrewards: [{name: form}]\n"
    text += "loss: {name: dapo, path: null, clip_high: 0.28}\ntracking: {mlflow: {tags: {}}}\n"
    (folder / "config.yaml").write_text(text)
    components = sorted(source.run()["components"])
    assert components == [
        ["loss", "dapo", "clip_high: 0.28"],
        ["observer", "mlflow", "tags: {}"],
        ["reward", "form", ""],
        ["reward of evaluations", "math", "column: gold"],
    ]


def test_a_pause_before_a_resume_is_no_part_of_the_time_nor_of_the_estimate(folder: Path) -> None:
    def step(number: int, time: float) -> str:
        return metrics_line(number, {"reward": 1, "step_time": 2.0}, time=time)

    append_metrics(folder, step(1, 1002), step(2, 1004), step(3, 90_006))
    evaluation = {"step": 3, "time": 90_009, "evaluation": {"reward": 1}}
    append_metrics(folder, json.dumps(evaluation) + "\n", step(4, 90_012))
    os.utime(folder / "versions.json", (90_000, 90_000))
    run = RunSource(folder).run()
    assert run["tiles"][-1][:2] == ["time", "11 s"]  # four steps, and 3 s of an evaluation
    assert run["seconds_left"] is None  # the run is not going on
    with hold(folder):
        assert RunSource(folder).run()["seconds_left"] == 6 * 6
    os.utime(folder / "versions.json", (900, 900))
    hours = RunSource(folder).run()["tiles"][-1][1]  # that run was slow, not resumed
    assert hours == duration(90_012 - 1000)


def test_numbers_that_json_lacks_are_text_or_null_and_counted(folder: Path) -> None:
    append_metrics(folder, *(metrics_line(step, {"kl": kl}) for step, kl in ((1, 1.5), (2, "nan"), (3, "inf"))))
    (folder / "alarms.json").write_text('{"alarms": [{"name": "kl_runaway", "step": 3, "value": NaN}]}')
    source = RunSource(folder)
    run, metrics = source.run(), source.metrics()
    json.dumps([run, metrics], allow_nan=False)
    assert "value NaN" in run["alarms"][0]["text"]
    assert metrics["series"]["kl"] == [[1, 2, 3], [1.5, None, None]]
    assert metrics["names"][0]["not_finite"] == 2


def test_flat_metrics_are_last_and_reward_and_evaluations_first(folder: Path) -> None:
    for step in (1, 2):
        append_metrics(
            folder,
            metrics_line(step, {"aa": 1.0, "loss": step, "rewards/a/mean": step, "reward": step}),
            metrics_line(step, {"accuracy": step}, "evaluation"),
        )
    names = RunSource(folder).metrics()["names"]
    assert [each["name"] for each in names] == ["reward", "evaluation/accuracy", "rewards/a/mean", "loss", "aa"]
    assert [each["is_flat"] for each in names] == [False, False, False, False, True]


def test_decimation_keeps_the_lowest_and_the_highest_value_and_gaps() -> None:
    steps = np.arange(10_000.0)
    values = np.sin(steps / 900)
    values[1234], values[7777], values[40:60], values[3000:6000] = 50.0, -50.0, math.nan, math.nan
    kept, reduced = decimate(steps, values, 200)
    assert len(kept) <= 200
    assert [reduced[list(kept).index(step)] for step in (1234, 7777)] == [50, -50]
    assert (kept[0], kept[-1]) == (0, 9999)
    assert (np.diff(kept) > 0).all()
    in_gap = (kept > 3100) & (kept < 5900)
    assert in_gap.sum() > 20
    assert not np.isfinite(reduced[in_gap]).any()
    assert np.isfinite(reduced[(kept < 2900) | (kept > 6100)]).all()


def test_the_history_of_all_phases_has_the_same_steps(folder: Path) -> None:
    """The page lays the phases on top of each other, and takes a step that is missing for 0."""
    seconds = np.random.default_rng(0).uniform(1, 2, (3000, 2)).tolist()
    saved = {1234: {"time/save": 9.0, "reward": 1.0}}
    lines = [
        metrics_line(step, {"time/a": a, "time/b": b, **saved.get(step, {})})
        for step, (a, b) in enumerate(seconds, 1)
    ]
    append_metrics(folder, *lines)
    source = RunSource(folder)
    history = source.phases()["history"]
    assert history["a"][0] == history["b"][0]
    assert len(history["a"][0]) <= 802
    assert history["save"] == [[1234], [9]]
    for step, told in ((1234, source.phases(step=1234)), (3000, source.phases())):
        a, b = seconds[step - 1]
        assert told["phases"] == [["a", a], ["b", b], *([["save", 9.0]] if step == 1234 else [])]


def test_ranks_stand_beside_their_machines_whose_measurements_stand_between_the_steps(folder: Path) -> None:
    steps = (metrics_line(step, {"reward": step}, time=1000.0 + 10 * step) for step in (1, 2, 3))
    append_metrics(folder, *steps)
    (folder / "versions.json").write_text(json.dumps({"world_size": 11}))
    (folder / "system").mkdir()
    source = RunSource(folder)
    for number in [10, *range(10)]:  # in the order in which they write
        name = f"system/node_{number}/cpu"
        lines = (metrics_line(n, {name: 50.0 + n}, time=1010.0 + 5 * n) for n in range(4))
        (folder / "system" / f"node_{number}.jsonl").write_text("".join(lines))
        told = source.run()["ranks"]
    assert [rank["host"] for rank in told] == [f"node_{number}" for number in range(11)]
    assert series(source, "system/node_0/cpu") == [[1, 1.5, 2, 2.5], [50, 51, 52, 53]]
    assert told[0]["values"] == {"cpu": 53}
