"""Resuming: damage in any file of any rank is found, and the trainer's state is restored."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.logs import LOGGED, LoggedText

from grpox.checkpoint.export import checkpoint_model, export_checkpoint
from grpox.checkpoint.folders import (
    FORMAT,
    MANIFEST,
    checkpoints_in,
    folder_of,
    publish,
    rank_file,
    unfinished_of,
    write_manifest,
)
from grpox.checkpoint.progress import PROGRESS, Progress, TrainingState, saved_fields
from grpox.checkpoint.resume import Checkpoint, check_changes, newest_good, no_checkpoint
from grpox.checkpoint.saver import ENGINE, CheckpointSaver
from grpox.checkpoint.shards import REFERENCE, ShardFiles
from grpox.cli.train import run_to_resume
from grpox.config import AdaptiveEntropyConfig, AlarmsConfig, CheckpointConfig, EarlyStopConfig, RunConfig
from grpox.data.schedule import PromptCursor, PromptSampler
from grpox.errors import ConfigError, Problem
from grpox.observing.alarms import Alarms
from grpox.observing.early_stop import EarlyStop, EarlyStopState
from grpox.runfile.lock.model import Lock, LockedComponent
from grpox.runfile.objects import MERGED
from grpox.runtime.world import World
from grpox.update.entropy_control import EntropyControl, EntropyControlState
from grpox.update.nonfinite import SkippedSteps

CPU = torch.device("cpu")
ALONE, TWO = World(0, 1, CPU), World(0, 2, CPU)
LOCK = Lock(api=1, config="", versions={}, distributions={}, components={})
ENTROPY = EntropyControlState(coefficient=0.3, entropy=0.1)
EARLY_STOP = EarlyStopState(metric="accuracy", mode="max", best=0.5, best_step=4, without_gain=1)


def config_of(**sections: Any) -> RunConfig:
    """A run of 8 completions a step, in groups of 4."""
    train = {"per_device_train_batch_size": 8, "num_generations": 4} | sections.pop("train", {})
    return RunConfig.model_validate(
        {
            "model": {"path": "a"},
            "data": {"path": "b.jsonl"},
            "rewards": [{"name": "regex", "weight": 1.0}],
            "train": train,
        }
        | sections
    )


def progress_of(run: RunConfig | None = None, **changed: Any) -> Progress:
    """After 5 steps, every number another."""
    held: dict[str, Any] = {
        "step": 5,
        "world_size": 1,
        "num_tokens": 1234,
        "seconds": 67.5,
        "evaluation_before": {"accuracy": 0.25},
        "metrics": {"evaluation/accuracy": 0.5, "loss": 1.0},
        "metrics_bytes": 99,
        "prompts_drawn": 17,
        "early_stop": EARLY_STOP,
        "entropy_control": ENTROPY,
        "skipped_steps": 3,
        "skipped_in_a_row": 2,
        "config": (run or config_of()).model_dump(mode="json"),
        "data": {"data.path": "1", "rewards[0].path": "2"},
        "lock": LOCK,
    }
    return Progress.model_validate(held | changed)


class Meeting:
    """Ranks as threads that meet in `gather`."""

    def __init__(self, size: int) -> None:
        self.given: list[list[Any]] = [[] for _ in range(size)]
        self.barrier = threading.Barrier(size)

    def run(self, work: Callable[[Any], Any]) -> list[Any]:
        """Return the result of `work` on each rank."""
        with ThreadPoolExecutor(len(self.given)) as ranks:
            return list(ranks.map(lambda rank: work(Rank(rank, self)), range(len(self.given))))


class Rank:
    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank, self.size, self.meeting = rank, len(meeting.given), meeting
        self.is_main = rank == 0

    def gather(self, items: Sequence[Any]) -> list[Any]:
        self.meeting.given[self.rank] = list(items)
        self.meeting.barrier.wait(30)
        gathered = [item for part in self.meeting.given for item in part]
        self.meeting.barrier.wait(30)
        return gathered


def save(output_dir: Path, progress: Progress, ranks: int = 2) -> Path:
    """A checkpoint of what a run of so many ranks writes, with a tensor in the place of each state."""
    folder = folder_of(output_dir, progress.step)
    unfinished = unfinished_of(folder)
    (unfinished / ENGINE).mkdir(parents=True)
    progress.write(unfinished)
    files = {}
    for rank in range(ranks):
        shards = ShardFiles(background=False)
        shards.submit({"shard": torch.tensor([rank])}, unfinished / ENGINE / f"zero-rank-{rank}.pt")
        shards.submit({"keys": [], "random": rank}, rank_file(unfinished, rank))
        if rank == 0:
            shards.submit({"weight": torch.ones(3)}, unfinished / REFERENCE)
        assert shards.finished() == []
        files |= {path.relative_to(unfinished).as_posix(): facts for path, facts in shards.written.items()}
    write_manifest(unfinished, files)
    publish(folder)
    return folder


NAMES = (
    f"{ENGINE}/zero-rank-0.pt",
    f"{ENGINE}/zero-rank-1.pt",
    "rank-00000.pt",
    "rank-00001.pt",
    REFERENCE,
    PROGRESS,
)


# -- damage ----------------------------------------------------------------------------------------------


def newest(output_dir: Path, ranks: int) -> tuple[Checkpoint | None, str]:
    """Return the result of `newest_good`, equal on all ranks, and the messages of all ranks together."""
    found = Meeting(ranks).run(lambda world: newest_good(output_dir, world))
    assert all(each == found[0] for each in found)
    return found[0], LOGGED()


@pytest.mark.parametrize("damage", ["flipped", "shorter", "longer", "removed"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_damage_of_any_file_is_found_by_all_ranks_and_named(
    tmp_path: Path, name: str, damage: str, ranks: int
) -> None:
    good = save(tmp_path, progress_of(step=5))
    damaged = save(tmp_path, progress_of(step=6))
    content = (damaged / name).read_bytes()
    size, what = len(content), "has another content than was written"
    match damage:
        case "flipped":
            content = content[:-1] + bytes([content[-1] ^ 1])
        case "shorter" | "longer":
            content = content[:-1] if damage == "shorter" else content + b"\0"
            what = f"has {len(content)} bytes, not {size}"
    (damaged / name).write_bytes(content)
    if damage == "removed":
        (damaged / name).unlink()
        what = "is missing"
    found, told = newest(tmp_path, ranks)
    assert found == Checkpoint(good, progress_of(step=5))
    what = "cannot be read: " if name == PROGRESS and damage != "shorter" else what
    assert told.startswith(f"warning: the checkpoint {damaged} is damaged and passed over: {name} {what}")
    assert told.count("\n") == told.count("warning") == told.count(f"{name} ") == 1  # each is read by one rank


def test_of_much_damage_three_files_are_named(tmp_path: Path) -> None:
    folder = save(tmp_path, progress_of())
    for name in NAMES[:-1]:
        (folder / name).unlink()
    found, told = newest(tmp_path, 1)
    assert found is None
    expected = "; ".join(f"{name} is missing" for name in sorted(NAMES[:-1])[:3])
    assert told == f"warning: the checkpoint {folder} is damaged and passed over: {expected}\n"


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("number", [2, FORMAT + 1])
def test_a_checkpoint_of_another_format_is_refused_by_its_number(
    tmp_path: Path, number: int, ranks: int
) -> None:
    """Every file of it is whole, and the one before it in this format is gone on from."""
    good = save(tmp_path, progress_of(step=5))
    other = save(tmp_path, progress_of(step=6)) / MANIFEST
    other.write_text(json.dumps(json.loads(other.read_text()) | {"format": number}))
    found, told = newest(tmp_path, ranks)
    assert found == Checkpoint(good, progress_of(step=5))
    assert told.count("\n") == 1
    assert str(other.parent) in told
    assert f"its layout is version {number}, this grpox reads {FORMAT}" in told


def test_without_progress_no_checkpoint_is_whole_even_if_its_manifest_says_so(tmp_path: Path) -> None:
    folder = save(tmp_path, progress_of())
    (folder / PROGRESS).write_text("{}")
    write_manifest(folder)
    found, told = newest(tmp_path, 2)
    assert found is None
    assert told.count("run.json cannot be read: ValidationError") == 1


def test_the_folders_are_those_that_rank_0_sees(tmp_path: Path) -> None:
    """As on a file system that shows a new folder to the others later."""
    (tmp_path / "other").mkdir()
    folder = save(tmp_path / "main", progress_of())
    seen = {0: tmp_path / "main", 1: tmp_path / "other"}
    found = Meeting(2).run(lambda world: newest_good(seen[world.rank], world))
    assert [each.folder for each in found] == [folder, folder]


# -- restoring -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_parts", [True, False])
def test_the_state_of_the_loop_becomes_what_it_was(has_parts: bool) -> None:
    state = TrainingState()
    if has_parts:
        state.cursor = PromptCursor(PromptSampler(100, 4, False, 0))
        state.early_stop = EarlyStop(EarlyStopConfig(metric="accuracy"))
        state.entropy_control = EntropyControl(AdaptiveEntropyConfig(), 0.0)
        state.alarms = Alarms(AlarmsConfig())
    progress = progress_of(hyperparameters={"beta": 0.5}, stop_reason="enough", losses=[3.0, 2.0])
    progress.restore(state)
    assert (state.seconds_before, state.evaluation) == (67.5, {"accuracy": 0.5})
    assert state.skipped == SkippedSteps(total=3, in_a_row=2)
    saved = saved_fields(state)
    del saved["seconds"], saved["metrics"]
    parts = {"prompts_drawn", "early_stop", "entropy_control", "alarms"}
    assert saved.keys() & parts == (parts if has_parts else set())
    assert saved.pop("alarms", None) == (state.alarms.state if state.alarms else None)
    assert saved == {name: getattr(progress, name) for name in saved}
    assert len(saved) == (10 if has_parts else 7)


# -- changes ---------------------------------------------------------------------------------------------


def problems_of(
    saved: Progress,
    config: RunConfig,
    lock: Lock = LOCK,
    data: Any = None,
    world: World = ALONE,
    **options: Any,
) -> list[Problem]:
    """Return the problems that `check_changes` finds, without the line that names the checkpoint."""
    folder = Path("runs/mine/checkpoints/step-00000005")
    try:
        check_changes(Checkpoint(folder, saved), config, lock, data or {}, world, **options)
    except ConfigError as error:
        first, *others = error.problems
        assert first.what == f"cannot go on from {folder}"
        # What the user may do is named where it helps: `--allow-changes` does not move states on nvme.
        assert ("--allow-changes" in first.allowed) == any("nvme" not in each.what for each in others)
        assert others
        return others
    return []


def test_each_key_of_another_value_is_told_with_both() -> None:
    other = config_of(
        train={"learning_rate": 0.5, "beta": 0.25}, rewards=[{"name": "regex", "weight": 2.0}], loss="cispo"
    )
    before = config_of()
    found = problems_of(progress_of(), other)
    assert {each.what for each in found} == {"is not what the checkpoint was made with"}
    assert {each.key: (each.given, each.allowed) for each in found} == {
        "rewards[0].weight": ("2.0", "1.0"),
        "loss.name": ("cispo", "dapo"),
        "train.learning_rate": ("0.5", str(before.train.learning_rate)),
        "train.beta": ("0.25", "0.0"),
    }
    assert problems_of(progress_of(), other, allow=True) == []


@pytest.mark.parametrize("key", ["hubs", "logging2", "model.output_dir"])
def test_a_key_that_is_like_a_free_one_is_not_free(key: str) -> None:
    section, _, name = key.partition(".")
    saved = config_of().model_dump(mode="json")
    config = {**saved, section: {**saved[section], name: "else"} if name else "else"}
    assert [each.key for each in problems_of(progress_of(config=config), config_of())] == [key]


@pytest.mark.parametrize(
    "sections",
    [
        {"output_dir": "elsewhere"},
        {"logging": {"completions_every": 3}},
        {"checkpoint": {"every": 7}},
        {"tracking": {}},
        {"tracking": {"mlflow": {"experiment": "other"}}},
        {"hub": {"repo": "me/mine"}},
        {"plugins": {"disable": ["other"]}},
        {"watchdog": {"tell_after": 5.0}},
        {"train": {"on_nonfinite": "skip"}},
        {"train": {"max_skips_in_a_row": 9}},
    ],
    ids=str,
)
def test_what_changes_nothing_that_is_computed_is_free(sections: dict[str, Any]) -> None:
    assert problems_of(progress_of(), config_of(**sections)) == []


def test_early_stopping_may_be_changed_for_a_run_that_stopped_by_it() -> None:
    evaluation = {"path": "heldout.jsonl"}
    stopping = config_of(evaluation=evaluation | {"early_stop": {"metric": "accuracy", "patience": 3}})
    patient = config_of(evaluation=evaluation | {"early_stop": {"metric": "accuracy", "patience": 9}})
    without = config_of(evaluation=evaluation)
    for before in (stopping, without):
        for after in (patient, without):
            assert problems_of(progress_of(before), after) == []
    other = config_of(evaluation={"path": "other.jsonl"})
    assert [each.key for each in problems_of(progress_of(stopping), other)] == ["evaluation.path"]


def test_other_code_of_a_component_is_told() -> None:
    def locked(needs: tuple[str, ...], given: str = "plugin") -> Lock:
        held = LockedComponent(kind="loss", name="mine", given=given, target="m:Mine", needs=needs)
        return LOCK.model_copy(update={"components": {"loss": held}})

    progress = progress_of(lock=locked(()))
    found = problems_of(progress, config_of(), locked(("logprobs",)))
    [problem] = found
    assert problem.what.startswith("other code")
    assert problem.what.endswith(": drift: loss needs: - -> logprobs")
    assert problems_of(progress, config_of(), locked(())) == []
    # Another environment is none, and neither is a plugin that observes unasked.
    assert problems_of(progress_of(), config_of(), LOCK.model_copy(update={"versions": {"torch": "9"}})) == []
    unasked = progress_of(lock=locked((), "unasked"))
    assert problems_of(unasked, config_of(), locked(("logprobs",), "unasked")) == []


def test_other_data_is_told_by_its_key() -> None:
    def told(**data: str) -> list[Problem]:
        return problems_of(progress_of(), config_of(), data={k.replace("_", "."): v for k, v in data.items()})

    assert told(data_path="1") == []
    assert told(data_path="9") == [
        Problem("holds something else than when the checkpoint was made", "data.path")
    ]
    assert told(evaluation_path="9") == []  # it was not read before, which the config tells
    assert told() == []


@pytest.mark.parametrize(
    ("ranks", "train"),
    [
        (2, {"per_device_train_batch_size": 4}),
        (1, {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}),
        (2, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "generation_batch_size": 8}),
    ],
)
def test_batches_that_are_only_split_otherwise_go_on(ranks: int, train: dict[str, Any]) -> None:
    assert problems_of(progress_of(), config_of(train=train), world=World(0, ranks, CPU)) == []


def test_other_batches_are_told_once_by_what_would_fit() -> None:
    [told] = problems_of(progress_of(), config_of(), world=TWO)
    for fact in ("2 ranks", "the 1 of the checkpoint"):
        assert fact in told.what
    assert told.given.startswith("16 completions a step")
    assert "train.per_device_train_batch_size=4" in told.allowed


@pytest.mark.parametrize("rank", [0, 1])
def test_changes_that_are_allowed_are_told_by_rank_0(rank: int, logged: LoggedText) -> None:
    world, other = World(rank, 1, CPU), config_of(loss="cispo", train={"beta": 0.25})
    assert problems_of(progress_of(), other, data={"data.path": "9"}, world=world, allow=True) == []
    lines = logged().splitlines()
    assert (lines[0] if lines else "") == ("warning: going on in spite of changes:" if rank == 0 else "")
    keys = [line.split(":")[0].strip() for line in lines[1:] if ": " in line]
    assert keys == (["loss.name", "train.beta", "data.path"] if rank == 0 else [])


@pytest.mark.parametrize("allow", [False, True])
def test_states_on_nvme_stay_on_their_ranks(allow: bool) -> None:
    settings = {"offload_optimizer": "nvme", "nvme_path": "/tmp"}
    nvme = config_of(deepspeed=settings)
    halves = config_of(deepspeed=settings, train={"per_device_train_batch_size": 4})
    [problem] = problems_of(progress_of(nvme), halves, world=TWO, allow=allow)
    assert (problem.given, problem.allowed) == ("2", "1")
    assert "nvme" in problem.what
    assert problems_of(progress_of(nvme), nvme, allow=allow) == []


@pytest.mark.parametrize(
    ("sections", "saved"),
    [
        # A tuple from Python is saved as a list, and a secret is left out; an older version has saved secrets.
        ({"loss": {"name": "mine", "bounds": (0.1, 0.2)}}, {"bounds": [0.1, 0.2]}),
        ({"generator": {"name": "vllm-server", "token": "hush"}}, {"token": "***"}),
        ({"model": {"path": "a", "init": {"hubToken": "hush"}}}, {}),
    ],
)
def test_a_value_that_is_saved_in_another_form_is_no_change(
    sections: dict[str, Any], saved: dict[str, Any]
) -> None:
    [section], config = sections, config_of(**sections)
    before = config.model_dump(mode="json")
    before[section] |= saved
    assert problems_of(progress_of(config=before), config) == []


def test_a_merged_adapter_is_needed_to_go_on_and_no_file_has_it(tmp_path: Path) -> None:
    config = config_of(model={"path": "a", "lora": {}})
    without, one, two = ({"data.path": "1", **merged} for merged in ({}, {MERGED: "one"}, {MERGED: "two"}))
    own = progress_of(config, data=one)
    assert problems_of(own, config, data=one) == []
    for before, now in ((own, two), (own, without), (progress_of(config, data=without), one)):
        assert [problem.key for problem in problems_of(before, config, data=now)] == [MERGED]
    folder = save(tmp_path, own)
    with pytest.raises(ConfigError, match="no file has the merged weights"):
        export_checkpoint(folder, tmp_path / "out")
    with pytest.raises(ConfigError, match="no file has the merged weights"):
        checkpoint_model(folder, config.model)


# -- none to go on from ----------------------------------------------------------------------------------


@pytest.mark.parametrize("damaged", [False, True])
def test_a_run_without_a_checkpoint_is_told_with_what_begins_anew(tmp_path: Path, damaged: bool) -> None:
    if damaged:
        (save(tmp_path, progress_of()) / MANIFEST).unlink()
    [problem] = no_checkpoint(tmp_path).problems
    assert (problem.key, problem.given) == ("--resume", str(tmp_path))
    assert problem.what == "holds no checkpoint to go on from" + (" that is whole" if damaged else "")
    assert f"grpox train {tmp_path}/config.yaml --resume auto" in problem.allowed


# -- when one is saved -----------------------------------------------------------------------------------


class Dates(CheckpointSaver):
    """Notes the steps at which it would save."""

    def save(self, state: TrainingState, step: int, wait: bool = False) -> None:
        self.steps.append(step)


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"every": 4}, [4, 7]),
        ({"every": 7}, [7]),
        ({"every": 100}, [7]),
        ({"every": 4, "last": False}, [4]),
        ({"every": 4, "last": False, "best": "reward"}, [4]),
        ({"every": 0}, []),
        ({"every": 0, "last": True}, [7]),
    ],
    ids=str,
)
def test_a_checkpoint_is_saved_every_so_many_steps_and_once_after_the_last(
    settings: dict[str, Any], steps: list[int]
) -> None:
    saver: Any = object.__new__(Dates)
    saver.config, saver._pending, saver.steps = CheckpointConfig(**settings), False, []
    for step in range(1, 8):
        saver.after_step(TrainingState(), step, last=step == 7)
    assert saver.steps == steps


def test_a_checkpoint_that_failed_may_be_saved_again(tmp_path: Path) -> None:
    saver: Any = object.__new__(CheckpointSaver)
    warned: list[str] = []
    saver.config, saver.world, saver.warn = CheckpointConfig(), ALONE, lambda _, told: warned.append(told)
    saver.context, saver.components = SimpleNamespace(output_dir=tmp_path), SimpleNamespace(saved=bytes)
    saver._pending, saver._saved = False, -1
    (tmp_path / "checkpoints").write_text("in the way")
    saver.save(TrainingState(), 4, wait=True)
    saver.save(TrainingState(), 4, wait=True)
    assert len(warned) == 2
    assert "the checkpoint after step 4 could not be saved" in warned[0]


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"keep": 2}, [5, 4]),
        ({"keep": 1, "best": "reward"}, [5, 2]),
        ({"keep": 1, "best": "reward", "best_is": "lowest"}, [5, 1]),
        ({"keep": 1, "best": "reward", "best_is": "min"}, [5, 1]),
        ({"keep": 1, "best": "reward", "best_is": "max"}, [5, 2]),
        ({"keep": 1, "best": "unknown"}, [5]),
        ({"keep": 9}, [5, 4, 3, 2, 1]),
    ],
)
def test_the_newest_and_the_best_are_kept(tmp_path: Path, settings: dict[str, Any], kept: list[int]) -> None:
    for step, reward in enumerate((0.1, 0.9, float("nan"), 0.5, 0.4), start=1):
        save(tmp_path, progress_of(step=step, metrics={"reward": reward}))
    saver: Any = object.__new__(CheckpointSaver)
    saver.config = CheckpointConfig(**settings)
    saver.context = SimpleNamespace(output_dir=tmp_path)
    save(tmp_path, progress_of(step=9, metrics={"reward": 7.0}))  # damaged, and so gone back behind
    saver._prune(5)
    assert folder_of(tmp_path, 9).exists()
    shutil.rmtree(folder_of(tmp_path, 9))
    assert [folder.name for folder in checkpoints_in(tmp_path)] == [f"step-{step:08d}" for step in kept]


def test_progress_is_read_back_as_it_was(tmp_path: Path) -> None:
    progress = progress_of(metrics={"reward": 0.5, "odd": float("inf")}, hyperparameters={"beta": 0.5})
    progress.write(tmp_path)
    assert Progress.read(tmp_path) == progress


# -- the run that --resume names --------------------------------------------------------------------------


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a run in runs/mine."""
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "config.yaml").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("there")
@pytest.mark.parametrize(
    ("run_file", "overrides", "resume", "expected"),
    [
        (None, [], "runs/mine", ("runs/mine/config.yaml", ["output_dir=runs/mine"])),
        ("a.b=1", ["c=2"], "runs/mine", ("runs/mine/config.yaml", ["a.b=1", "c=2", "output_dir=runs/mine"])),
        ("run.yaml", ["c=2"], "runs/mine", ("run.yaml", ["c=2", "output_dir=runs/mine"])),
        ("run.yaml", ["c=2"], "auto", ("run.yaml", ["c=2"])),
    ],
)
def test_what_resume_goes_on_with(run_file: Any, overrides: Any, resume: str, expected: Any) -> None:
    assert run_to_resume(run_file, overrides, resume) == expected


@pytest.mark.usefixtures("there")
@pytest.mark.parametrize(
    ("run_file", "resume", "told"),
    [(None, "auto", "run file"), (None, "runs/mien", "runs/mine"), (None, "runs", "holds no run")],
)
def test_what_resume_cannot_go_on_with_is_told(run_file: Any, resume: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run_to_resume(run_file, [], resume)
    assert told in "\n".join(map(str, caught.value.problems))
