"""The lock names the code of a run, and two of them tell what changed and how grave that is."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.golden import Golden
from support.logs import LoggedText
from support.problems import refused
from typer.testing import CliRunner

from grpox.cli.plugins import app
from grpox.config import RunConfig
from grpox.contracts import RunContext
from grpox.errors import ConfigError
from grpox.observing.record import LocalRecord
from grpox.runfile.load import load_run, resolve_config
from grpox.runfile.lock.differences import Severity, check_ranks, compare, run_differences
from grpox.runfile.lock.model import LOCK_FILE, Lock, LockFile, config_hash, read_lock
from grpox.runfile.lock.of_run import lock_of, origin_of, recorded_files
from grpox.training.arguments import read_arguments

PLUGIN = """
import sys
from grpox import ComponentSpec, hookimpl

@hookimpl
def grpox_losses():
    return [ComponentSpec("tiny", "grpox_tiny_loss:Tiny", provides=("smallness",))]
"""
OBSERVES = """
from grpox import hookimpl

@hookimpl
def grpox_step_finished(step): ...
"""
MINE = """
from grpox.contracts import Reduction

class Mine:
    reduction = Reduction.TOKEN_MEAN
    needs = ("entropy",)
    def per_token(self, inputs): ...
"""


def locked(*overrides: str) -> Lock:
    return lock_of(load_run("quickstart", overrides))


def differences(old: Lock, new: Lock) -> list[str]:
    return [str(each) for each in compare(old, new)]


def run_git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def tiny(make_distribution: Callable[..., Path]) -> Path:
    """The folder of an installed distribution grpox-tiny 1.0, which offers the loss `tiny`."""
    folder = make_distribution("grpox-tiny", PLUGIN)
    (folder / "grpox_tiny_loss.py").write_text("raise ImportError('the lock must not import this')\n")
    return folder


def direct_url(folder: Path, content: dict[str, Any]) -> None:
    (folder / "grpox_tiny-1.0.dist-info" / "direct_url.json").write_text(json.dumps(content))


def test_the_lock_of_the_quickstart_names_every_component_and_is_always_the_same() -> None:
    lock = locked()
    assert list(lock.components) == [
        "generator", "advantage", "loss", "correction", "rewards[0]", "tracking.mlflow",
    ]  # fmt: skip
    loss = lock.components["loss"]
    assert (loss.kind, loss.name, loss.given, loss.distribution) == ("loss", "dapo", "plugin", "grpox")
    assert loss.target == "grpox_losses.losses:Dapo"
    assert lock.components["generator"].provides == ("logprobs", "max_tokens")
    assert list(lock.distributions) == ["grpox"]
    assert lock.distributions["grpox"].version == metadata.version("grpox")
    assert lock.distributions["grpox"].files > 150
    assert lock.versions["torch"] == metadata.version("torch")
    assert lock.versions["python"] == ".".join(map(str, sys.version_info[:3]))
    # It reads back as itself, with the same digest each time.
    lock = locked()
    assert Lock.model_validate_json(lock.text()) == lock
    assert locked("output_dir=runs/elsewhere").text() == lock.text()
    assert json.loads(lock.text())["digest"] == lock.digest
    other = locked("train.max_steps=3")
    assert (other.digest != lock.digest, other.config != lock.config) == (True, True)
    assert config_hash({"b": 1, "a": [1.0]}) == config_hash({"a": [1.0], "b": 1}) != config_hash({"a": [1.0]})


def test_a_changed_source_file_is_drift_for_those_who_select_the_plugin(tiny: Path) -> None:
    before, others = locked("loss=tiny"), locked()
    assert before.components["loss"].provides == ("smallness",)
    assert before.distributions["grpox-tiny"].files == 2
    assert "grpox_tiny_loss" not in sys.modules
    assert compare(before, locked("loss=tiny")) == []
    with (tiny / "grpox_tiny_loss.py").open("a") as file:
        file.write("# changed\n")
    (found,) = compare(before, locked("loss=tiny"))
    assert (found.severity, found.what) == (Severity.DRIFT, "grpox-tiny sources")
    assert locked() == others
    # The gravest difference comes first.
    after = with_changes(locked("loss=tiny", "train.seed=1"), "versions", {"torch": "1.0"})
    assert [one.severity.value for one in compare(before, after)] == ["drift", "environment", "config"]


def test_a_working_copy_before_a_wheel_is_what_the_lock_identifies(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tiny / "grpox_tiny-1.0.dist-info" / "RECORD").write_text(
        "grpox_tiny.py,,\ngrpox_tiny_loss.py,,\ndata.txt,,\n"
    )
    (tiny / "data.txt").write_text("of the wheel")
    before = locked("loss=tiny")
    assert before.distributions["grpox-tiny"].files == 3
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "grpox_tiny_loss.py").write_text("# a working copy\n")
    monkeypatch.syspath_prepend(str(tmp_path / "copy"))
    (found,) = compare(before, locked("loss=tiny"))
    assert (found.severity, found.what) == (Severity.DRIFT, "grpox-tiny sources")
    (tmp_path / "copy" / "grpox_tiny_loss.py").write_text((tiny / "grpox_tiny_loss.py").read_text())
    assert locked("loss=tiny") == before  # the same code, whatever installed it


def test_another_version_or_distribution_is_drift_told_once_and_another_config_is_none(
    tiny: Path, make_distribution: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = locked("loss=tiny")
    metadata_file = tiny / "grpox_tiny-1.0.dist-info" / "METADATA"
    told = metadata_file.read_text()
    metadata_file.write_text(told.replace("Version: 1.0", "Version: 1.1"))
    source = (tiny / "grpox_tiny_loss.py").read_text()
    (tiny / "grpox_tiny_loss.py").write_text("# another version has other sources\n")
    assert differences(before, locked("loss=tiny")) == ["drift: grpox-tiny version: 1.0 -> 1.1"]
    metadata_file.write_text(told)
    (tiny / "grpox_tiny_loss.py").write_text(source)
    found = compare(locked(), before)
    assert {one.severity for one in found} == {Severity.CONFIG}
    assert (found[0].what, found[0].old, found[0].new) == ("loss", "dapo (grpox)", "tiny (grpox-tiny)")
    assert [one.what for one in compare(locked(), locked("train.seed=1"))] == ["resolved config"]
    make_distribution("grpox-other", PLUGIN)
    monkeypatch.setenv("GRPOX_DISABLE_PLUGINS", "grpox-tiny")
    told = "drift: loss: tiny (grpox-tiny) -> tiny (grpox-other)"
    assert differences(before, locked("loss=tiny")) == [told]


@pytest.mark.parametrize(
    ("part", "changed", "told"),
    [
        ("components", {"generator": {"provides": []}}, "drift: generator provides: logprobs, max_tokens -> -"),
        ("versions", {"torch": "1.0"}, f"environment: torch version: {metadata.version('torch')} -> 1.0"),
        # grpox is one of the distributions, which tell its version.
        ("versions", {"grpox": "9.9"}, ""),
        ("distributions", {"grpox": {"api": 2}}, "drift: grpox plugin API: 1 -> 2"),
    ],
)
def test_each_change_has_its_severity(part: str, changed: dict[str, Any], told: str) -> None:
    before = locked()
    assert differences(before, with_changes(before, part, changed)) == [told] * bool(told)


def with_changes(lock: Lock, part: str, changed: dict[str, Any]) -> Lock:
    """Return a lock with other entries in a part; of an entry that is a mapping, other values."""
    data = lock.model_dump(mode="json")
    for name, value in changed.items():
        data[part][name] = data[part][name] | value if isinstance(value, dict) else value
    return Lock.model_validate(data)


def test_a_component_given_by_path_is_locked_by_its_file_and_not_by_its_folder(tmp_path: Path) -> None:
    locks = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text(MINE)
        locks.append(locked(f"loss={{path: '{tmp_path}/{name}/mine.py:Mine'}}"))
    loss = locks[0].components["loss"]
    assert (loss.given, loss.target, loss.needs) == ("path", f"{tmp_path}/a/mine.py:Mine", ("entropy",))
    assert loss.distribution is None
    assert [one.severity for one in compare(*locks)] == [Severity.CONFIG, Severity.ORIGIN]
    (tmp_path / "a" / "mine.py").write_text(MINE + "# changed\n")
    (found,) = compare(locks[0], locked(f"loss={{path: '{tmp_path}/a/mine.py:Mine'}}"))
    assert (found.severity, found.what) == (Severity.DRIFT, "loss file")


def is_short(completions: list[str], **columns: object) -> list[float]:
    return [float(len(completion) < 3) for completion in completions]


def test_objects_of_python_and_plugins_that_observe_are_locked(
    make_distribution: Callable[..., Path],
) -> None:
    given = read_arguments(None, None, None, None, [is_short])
    config = load_run("quickstart", ["evaluation=null"]).config
    run = resolve_config(config, Path.cwd(), "python", given=given)
    reward = lock_of(run).components["rewards[0]"]
    assert (reward.given, reward.target) == ("python", f"{__name__}:is_short")
    assert reward.sha256 is None
    # A plugin that observes every run.
    before = locked()
    make_distribution("grpox-watch", OBSERVES)
    after = locked()
    assert after.components["plugin grpox-watch:plugin"].given == "unasked"
    assert after.distributions["grpox-watch"].version == "1.0"
    assert [one.severity for one in compare(before, after)] == [Severity.ENVIRONMENT]
    assert after.selected() == before


def test_an_installed_wheel_is_locked_by_the_files_of_its_record(tmp_path: Path) -> None:
    wheel = tmp_path / "grpox_tiny-1.0-py3-none-any.whl"
    info = "grpox_tiny-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("grpox_tiny/__init__.py", PLUGIN)
        archive.writestr("grpox_tiny/words.txt", "one two")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: grpox-tiny\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    site = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--target", str(site)]
    subprocess.run([*command, str(wheel)], check=True, capture_output=True)
    (distribution,) = metadata.distributions(path=[str(site)])
    assert (site / "grpox_tiny" / "__pycache__").exists()
    assert sorted(recorded_files(distribution)) == ["grpox_tiny/__init__.py", "grpox_tiny/words.txt"]
    _, origin = origin_of(distribution)
    assert origin == {"editable": False, "origin": wheel.as_uri(), "commit": None}


def test_an_install_from_git_is_locked_by_its_commit_and_an_editable_one_by_that_of_its_folder(
    tiny: Path,
) -> None:
    vcs = {"vcs": "git", "commit_id": "abc123"}
    direct_url(tiny, {"url": "https://me:hush@example.org/tiny.git", "vcs_info": vcs})
    held = locked("loss=tiny").distributions["grpox-tiny"]
    assert held.origin == "https://me:***@example.org/tiny.git"
    assert (held.commit, held.editable) == ("abc123", False)

    direct_url(tiny, {"url": tiny.as_uri(), "dir_info": {"editable": True}})
    run_git(tiny.parent, "init", "--quiet")  # a repository around the folder, which does not hold it
    run_git(tiny.parent, "commit", "--quiet", "--allow-empty", "--message", "first")
    held = locked("loss=tiny").distributions["grpox-tiny"]
    assert (held.editable, held.commit, held.dirty) == (True, None, None)

    run_git(tiny, "init", "--quiet")
    run_git(tiny, "add", ".")
    run_git(tiny, "commit", "--quiet", "--message", "first")
    clean = locked("loss=tiny")
    held = clean.distributions["grpox-tiny"]
    assert (held.commit, held.dirty) == (run_git(tiny, "rev-parse", "HEAD"), False)

    run_git(tiny, "commit", "--quiet", "--allow-empty", "--message", "second")
    (found,) = compare(clean, locked("loss=tiny"))
    assert (found.severity, found.what) == (Severity.ORIGIN, "grpox-tiny commit")
    (tiny / "grpox_tiny_loss.py").write_text("# changed\n")
    dirty = locked("loss=tiny")
    assert dirty.distributions["grpox-tiny"].dirty is True
    (line,) = differences(clean, dirty)
    assert line.startswith("drift: grpox-tiny sources: ")
    assert line.endswith(" with changes")


def test_only_the_distributions_own_files_of_a_namespace_are_hashed(
    make_distribution: Callable[..., Path],
) -> None:
    locks = []
    for name in ("one", "two"):
        folder = make_distribution(f"grpox-{name}", "", entry_points={"plugin": f"family.{name}.plugin"})
        (folder / "family" / name).mkdir(parents=True)
        (folder / "family" / name / "plugin.py").write_text(PLUGIN.replace('"tiny"', f'"{name}"'))
        (folder / "family" / name / "__init__.py").write_text("")
        locks.append(folder)
    held = locked("loss=one").distributions["grpox-one"]
    assert held.files == 2
    (locks[1] / "family" / "two" / "__init__.py").write_text("# changed\n")
    assert locked("loss=one").distributions["grpox-one"] == held


def test_a_lock_is_answered_by_its_folder_and_an_earlier_one_is_set_aside(tmp_path: Path) -> None:
    data = {"model": {"path": "m"}, "data": {"path": "d.jsonl"}, "rewards": ["exact"]}
    run = RunContext(RunConfig.model_validate(data), tmp_path, 10, 1, {}, None, "run.yaml")
    first, second = locked(), locked("train.seed=1")
    for lock in (first, second):
        LocalRecord().grpox_run_started(run)
        LockFile(lock).grpox_run_started(run)
    assert read_lock(tmp_path) == second
    (earlier,) = tmp_path.glob(f"earlier/*/{LOCK_FILE}")
    assert read_lock(earlier) == first
    # A folder without a lock is answered with those around it.
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / LOCK_FILE).write_text(locked().text())
    (problem,) = refused(read_lock, tmp_path / "frist")
    assert problem.what == "no such run folder or lock file"
    assert problem.nearest == str(tmp_path / "first")
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(ConfigError, match="is not a plugin lock"):
        read_lock(tmp_path / "broken.json")


def test_lock_prints_what_it_would_write_and_changes_no_lock_of_a_run(tmp_path: Path) -> None:
    printed = CliRunner().invoke(app, ["lock", "quickstart", "train.seed=1"]).stdout
    assert printed == locked("train.seed=1").text()
    (tmp_path / LOCK_FILE).write_text(printed)
    for path in (tmp_path, tmp_path / LOCK_FILE):
        assert CliRunner().invoke(app, ["lock", str(path)]).stdout == printed
    saved = tmp_path / "saved.json"
    CliRunner().invoke(app, ["lock", str(tmp_path), "--output", str(saved)])
    assert saved.read_text() == printed
    refused = CliRunner().invoke(app, ["lock", str(tmp_path), "train.seed=1"]).exception
    assert isinstance(refused, ConfigError)
    assert "overrides need a run file or recipe" in str(refused)


def test_diff_names_the_keys_of_the_config_and_says_so_if_there_are_none(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 7)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / LOCK_FILE).write_text(locked(f"train.seed={seed}").text())
        (folder / "config.yaml").write_text(f"train: {{seed: {seed}}}\noutput_dir: runs/{name}\n")
    (found,) = run_differences(tmp_path / "a", tmp_path / "b")
    assert (found.severity, found.what, found.old, found.new) == (Severity.CONFIG, "train.seed", "0", "7")
    paths = [str(tmp_path / name) for name in ("a", "b")]
    differ = CliRunner().invoke(app, ["diff", *paths], env={"COLUMNS": "200"})
    assert differ.exit_code == 1
    assert ["config", "train.seed", "0", "7"] in [line.split() for line in differ.stdout.splitlines()]
    equal = CliRunner().invoke(app, ["diff", paths[0], paths[0]])
    assert (equal.exit_code, equal.stdout.startswith("no difference between ")) == (0, True)


def check(ranks: list[tuple[str, Lock, dict[str, Any]]]) -> None:
    """Compare the hosts, locks and configs of ranks as rank 0 does."""
    locks = [(host, lock.selected(), config) for host, lock, config in ranks]
    digests = [lock.digest for _, lock, _ in locks]
    answers = iter([digests, [json.dumps([host, lock.text(), config]) for host, lock, config in locks]])
    world = SimpleNamespace(gather=lambda own: next(answers), is_main=True)
    check_ranks(world, ranks[0][1], ranks[0][2])  # type: ignore[arg-type]


def test_the_ranks_of_a_machine_with_other_code_are_named_with_both_versions(
    tiny: Path, logged: LoggedText
) -> None:
    mine = locked("loss=tiny")
    theirs = with_changes(mine, "distributions", {"grpox-tiny": {"version": "2.0"}})
    # A vllm that only one rank has is not needed.
    theirs = with_changes(theirs, "versions", {"torch": "1.0", "vllm": "0.1"})
    version, library = refused(check, [("a", mine, {}), ("b", theirs, {}), ("a", mine, {}), ("c", theirs, {})])
    for fact in ("ranks 1, 3 (b, c): ", "grpox-tiny version", "rank 0 (a)"):
        assert fact in version.what
    assert (version.given, version.allowed) == ("2.0", "1.0")
    assert (library.given, library.allowed) == ("1.0", metadata.version("torch"))
    assert logged() == ""


def test_another_config_on_a_rank_is_a_warning_that_names_the_keys_but_not_the_paths(
    golden: Golden, caplog: pytest.LogCaptureFixture
) -> None:
    mine, theirs = locked(), locked("train.seed=1")
    left = {"train": {"seed": 0}, "model": {"path": "/here/m"}, "rewards": [{"weight": 1.0}]}
    right = {"train": {"seed": 1}, "model": {"path": "/there/m"}, "rewards": [{"weight": 0.5}]}
    check([("a", mine, left), ("b", theirs, right)])
    [record] = caplog.records
    golden(record.getMessage())
