"""The contract of its kind; contents of the event files, after hook calls and of a real run."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import grpox
import pytest
from grpox.config import RunConfig
from grpox.contracts import Rollout, RunContext, ScoredRollout
from grpox.testing import ObserverConformance
from pyarrow import parquet
from pydantic import ValidationError
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from grpox_tensorboard.config import TensorBoardConfig
from grpox_tensorboard.observer import TensorBoard

DEFAULTS = TensorBoardConfig()


class TestTensorboardObserver(ObserverConformance):
    component = "tensorboard"


def run_in(folder: Path) -> RunContext:
    data, train = {"path": "train.jsonl"}, {"learning_rate": 2e-4}
    content = {"model": {"path": "model"}, "data": data, "rewards": [{"name": "exact"}], "train": train}
    return RunContext(RunConfig.model_validate(content), folder, 2, 1, {"grpox": "0.1.0"}, None, "quickstart")


def events(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0}).Reload()


def texts(read: EventAccumulator, tag: str) -> dict[int, str]:
    summaries = read.Tensors(f"{tag}/text_summary")
    return {event.step: event.tensor_proto.string_val[0].decode() for event in summaries}


def scalars(read: EventAccumulator, tag: str) -> dict[int, float]:
    return {event.step: event.value for event in read.Scalars(tag)}


def rollout(completion: str, reward: float = 1.0) -> ScoredRollout:
    sampled = Rollout(0, 0, (5, 6), (7, 2), "stop", 0)
    return ScoredRollout(sampled, "2+3=", completion, {"exact": reward, "brief": None}, reward, 0.7)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[TensorBoard]:
    observer = TensorBoard(DEFAULTS)
    observer.grpox_run_started(run_in(tmp_path))
    yield observer
    observer.grpox_run_finished()


def test_a_real_run_has_in_tensorboard_what_its_metrics_say(tmp_path: Path) -> None:
    overrides = ["train.max_steps=3", "tracking={tensorboard: {}}", f"output_dir={tmp_path}"]
    grpox.train("quickstart", overrides)
    expected = {}
    for line in map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines()):
        prefix = "evaluation/" if "evaluation" in line else ""
        for name, value in (line.get("metrics") or line["evaluation"]).items():
            expected[prefix + name.removeprefix(prefix), line["step"]] = value
    read = events(tmp_path / "tensorboard")
    written = {
        (tag, step): value for tag in read.Tags()["scalars"] for step, value in scalars(read, tag).items()
    }
    assert {step for _, step in expected} == {0, 1, 2, 3}
    assert written.keys() == expected.keys()
    for place, value in expected.items():  # float32 has 24 bits
        assert written[place] == pytest.approx(float(value), rel=2**-23, abs=1e-38, nan_ok=True), place
    assert texts(read, "config")[0].startswith("    model:\n      path: ")
    first = parquet.read_table(tmp_path / "completions" / "step_000001.parquet").slice(0, 1).to_pylist()[0]
    shown = f"    {first['prompt']}\n\ncompletion:\n\n    {first['completion']}"
    assert shown in texts(read, "completions")[1]


def test_a_failed_run_keeps_its_steps_and_its_error(started: TensorBoard, tmp_path: Path) -> None:
    started.grpox_step_finished(1, {"reward": 0.5, "loss": math.inf})
    started.grpox_run_failed(RuntimeError("out of memory"))
    read = events(tmp_path / "tensorboard")
    assert (scalars(read, "reward"), scalars(read, "loss")) == ({1: 0.5}, {1: math.inf})
    assert texts(read, "error") == {1: "    RuntimeError: out of memory"}
    TensorBoard(DEFAULTS).grpox_run_failed(RuntimeError("no such model"))  # before any file was opened


def test_completions_come_at_their_interval_and_up_to_their_number(tmp_path: Path) -> None:
    observer = TensorBoard(TensorBoardConfig(completions=2, completions_every=2))
    observer.grpox_run_started(run_in(tmp_path))
    for step in (1, 2, 3):
        observer.grpox_rollouts_scored(step, [rollout(f"```\n{step}{place}") for place in range(3)])
    observer.grpox_run_finished()
    shown = texts(events(tmp_path / "tensorboard"), "completions")
    assert list(shown) == [1, 3]
    assert [number in shown[1] for number in ("    ```\n    10", "    11", "    12")] == [True, True, False]
    assert "**reward 1, advantage 0.7** (exact 1, brief none)" in shown[3]


def test_the_tab_of_hyperparameters_has_the_run(started: TensorBoard, tmp_path: Path) -> None:
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    started.grpox_run_finished()
    contents = events(tmp_path / "tensorboard").PluginTagToContent("hparams")
    start = HParamsPluginData.FromString(contents["_hparams_/session_start_info"]).session_start_info
    assert start.hparams["train.learning_rate"].number_value == 2e-4
    assert start.hparams["loss.name"].string_value == "dapo"
    assert start.hparams["rewards.0.name"].string_value == "exact"
    assert start.hparams["train.generation_batch_size"].string_value == "null"


@pytest.mark.parametrize("folder", ["../elsewhere", "", "/tmp/here"])
def test_the_folder_stays_within_the_run(folder: str) -> None:
    with pytest.raises(ValidationError):
        TensorBoardConfig(folder=folder)
    assert TensorBoard(TensorBoardConfig(folder="tb")).files == ("tb",)  # a new run moves it to earlier/
