"""The report shows what the run's files hold, says what it leaves out, and obeys nothing written in them."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pluggy
import pytest
from support.logs import LOGGED
from typer.testing import CliRunner

from grpox.cli import app as cli
from grpox.config import RunConfig
from grpox.contracts import Rollout, RunContext, ScoredRollout
from grpox.errors import ConfigError
from grpox.observing.display import RunReport
from grpox.observing.observers import Observers
from grpox.observing.record import LocalRecord
from grpox.observing.record_files import write_completions
from grpox.observing.report.charts import Chart, Curve, binned, charts_of, draw, left_out, marked_evaluations
from grpox.observing.report.data import MOST_BATCHES, MOST_SAMPLES, RunRecord, read_record, read_samples, spread
from grpox.observing.report.page import number, render, write_report
from grpox.plugins import hookspecs
from grpox.plugins.hookspecs import hookimpl

EVIL = "</pre></script><script>alert(1)</script><img src=x onerror=alert(2)>{{ 7 * 7 }} & <b>4</b>"


def scored(reward: float, completion: str = "4", prompt: str = "2+2=", **extra: Any) -> ScoredRollout:
    rollout = Rollout(0, 0, (1,), (2, 3), "stop", 0)
    return ScoredRollout(rollout, prompt, completion, {"math": reward}, reward, 0.5, extra)


def metrics_line(step: int, kind: str = "metrics", **values: Any) -> str:
    named = {name.replace("__", "/"): value for name, value in values.items()}
    return json.dumps({"step": step, "time": 1000.0 + 10 * step, kind: named}) + "\n"


def run_folder(folder: Path, *lines: str, rollouts: Sequence[ScoredRollout] = (), **files: str) -> Path:
    """A run's folder with these lines of metrics, completions of its first step, and other files by stem."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(lines or [metrics_line(1, reward=0.5)]))
    if rollouts:
        write_completions(folder / "completions" / "step_000001.parquet", 1, rollouts)
    for stem, text in files.items():
        suffix = ".yaml" if stem == "config" else ".json"
        (folder / f"{stem}{suffix}").write_text(text)
    return folder


def record_of(folder: Path, *lines: str) -> RunRecord:
    return read_record(run_folder(folder, *lines))


class Page(HTMLParser):
    """The elements of a page with their attributes, and the text of those with a class."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self._open: str | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._open = dict(attrs).get("class") or tag

    def handle_data(self, data: str) -> None:
        if self._open is not None:
            self.texts.append((self._open, data))
            self._open = None

    def count(self, tag: str) -> int:
        return sum(element == tag for element, _ in self.elements)

    def text(self, kind: str) -> list[str]:
        return [text for name, text in self.texts if name == kind]


# -- Reading a folder ------------------------------------------------------------------------------------


def test_a_record_is_read_back_with_steps_in_order_and_odd_numbers(tmp_path: Path) -> None:
    evaluation = metrics_line(0, "evaluation", accuracy=0.25)
    steps = [metrics_line(2, loss="nan"), metrics_line(1, loss=1), metrics_line(2, loss="-inf", kl=3)]
    record = record_of(tmp_path, evaluation, *steps)
    assert [told.step for told in record.steps] == [1, 2]
    # Step 2 was taken again, as after a resume: the later line is the run's.
    assert record.steps[1].values == {"loss": -math.inf, "kl": 3.0}
    assert record.evaluations[0].values == {"accuracy": 0.25}
    assert (record.status, record.seconds) == ("unfinished", 20.0)


def test_half_a_line_at_the_end_is_ignored(tmp_path: Path) -> None:
    record = record_of(tmp_path, metrics_line(1, loss=1.0), '{"step": 2, "ti')
    assert [told.step for told in record.steps] == [1]


def test_a_broken_line_in_the_middle_is_told_with_its_number(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"metrics.jsonl:2: not a line of metrics: KeyError: 'evaluation'"):
        record_of(tmp_path, metrics_line(1, loss=1.0), '{"step": 2}\n', metrics_line(3, loss=1.0))


def test_a_run_is_finished_with_a_summary_and_failed_with_a_failure(tmp_path: Path) -> None:
    failure = '{"error": "RunFailed: no http://me:secret@host"}'
    failed = read_record(run_folder(tmp_path / "a", failure=failure))
    assert failed.status == "failed"
    assert Page(render(failed)).text("error") == ["RunFailed: no http://me:***@host"]
    # A run that was resumed after a failure and then finished.
    finished = read_record(
        run_folder(tmp_path / "b", failure=failure, summary='{"train_seconds": 61.4, "steps": 1}')
    )
    assert (finished.status, finished.seconds) == ("finished", 61.4)
    assert Page(render(finished)).text("error") == []


# -- Completions -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "most", "places"),
    [(0, 8, []), (1, 8, [0]), (3, 8, [0, 1, 2]), (12, 4, [0, 4, 7, 11]), (256, 3, [0, 128, 255])],
)
def test_places_are_spread_evenly_from_the_first_to_the_last(count: int, most: int, places: list[int]) -> None:
    # 11 / 3 = 3.67 apart, and 255 / 2 = 127.5, rounded to even.
    assert spread(count, most) == places


def test_of_a_batch_the_best_and_the_worst_are_shown_and_what_has_no_reward_last(tmp_path: Path) -> None:
    rewards = [0.01 * place for place in range(99)] + [math.nan, 7.0]
    run_folder(tmp_path, rollouts=[scored(reward) for reward in reversed(rewards)])
    ((batch,), saved) = read_samples(tmp_path)
    assert (saved, batch.total, len(batch.samples)) == (1, 101, MOST_SAMPLES)
    assert (batch.best, batch.worst) == (7.0, 0.0)
    assert batch.mean == pytest.approx((0.01 * 98 * 99 / 2 + 7) / 100)
    shown = [sample.reward for sample in batch.samples]
    assert shown[0] == 7.0
    assert math.isnan(shown[-1])
    assert shown[:-1] == sorted(shown[:-1], reverse=True)


def test_batches_follow_the_run_and_not_their_names(tmp_path: Path) -> None:
    for name in ("step_1000000", "step_000002_2", "step_999999", "step_000002", "notes"):
        write_completions(tmp_path / "completions" / f"{name}.parquet", 1, [scored(1.0)])
    batches, saved = read_samples(tmp_path)
    assert [batch.label for batch in batches] == ["step 2", "step 2, batch 2", "step 999999", "step 1000000"]
    assert saved == 4


def test_long_texts_are_cut_in_the_middle_and_invisible_characters_shown(tmp_path: Path) -> None:
    text = "a" * 900 + "b" * 1000 + "c" * 800
    run_folder(tmp_path, rollouts=[scored(1.0, text, "\x1b[2J\u202e\n\tü")])
    ((batch,), _) = read_samples(tmp_path)
    assert batch.samples[0].completion == "a" * 800 + "\n[... 1100 characters ...]\n" + "c" * 800
    assert batch.samples[0].prompt == "\\x1b[2J\\u202e\n\tü"


def test_what_is_not_parquet_is_told_with_its_path(tmp_path: Path) -> None:
    run_folder(tmp_path, rollouts=[scored(1.0)])
    (tmp_path / "completions" / "step_000001.parquet").write_text("no")
    with pytest.raises(ConfigError, match=r"step_000001.parquet: cannot be read as parquet"):
        read_samples(tmp_path)


# -- Curves ----------------------------------------------------------------------------------------------


def test_neighbouring_steps_become_one_point_where_there_are_too_many() -> None:
    curve = Curve([1, 2, 3, 4, 5], [1.0, math.nan, 5.0, math.nan, math.nan])
    short = binned(curve, most=2)
    # Three steps a point: (1 + 5) / 2, and nothing finite.
    assert short.steps == [2.0, 4.5]
    assert short.values == pytest.approx([3.0, math.nan], nan_ok=True)
    assert binned(curve, most=5) is curve


def test_only_charts_that_have_values_are_drawn(tmp_path: Path) -> None:
    line = metrics_line(
        1, rewards__a__b__mean=1, loss=1, clip_ratio__low_mean=0, clip_ratio__low_max=1, time__update=2
    )
    charts = charts_of(record_of(tmp_path, line))
    assert {chart.title: list(chart.metrics.values()) for chart in charts} == {
        "Reward: a/b": ["rewards/a/b/mean"],
        "Loss": ["loss"],
        "Tokens clipped": ["clip_ratio/low_mean"],
        "Time of a step": ["time/update"],
    }


def points(drawing: str, colour: str) -> list[tuple[float, float]]:
    """Return the path of the line of `colour`, in the drawing's units: down is more."""
    (path,) = re.findall(rf'<path d="([^"]+)" [^>]*style="fill: none; stroke: var\({colour}\)', drawing)
    numbers = [float(text) for text in re.findall(r"[\d.]+", path)]
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def test_a_line_is_where_its_values_are_and_breaks_where_one_is_not_finite(tmp_path: Path) -> None:
    values = [0.0, 1.0, 0.5, "inf", 0.25]
    record = record_of(tmp_path, *(metrics_line(step, loss=value) for step, value in enumerate(values, 1)))
    chart = Chart("Loss", "", {"loss": "loss"})
    (x1, y1), (x2, y2), (x3, y3), (x5, y5) = points(draw(chart, record), "--c0")
    assert [x2 - x1, x3 - x2, x5 - x3] == pytest.approx([x2 - x1, x2 - x1, 2 * (x2 - x1)], abs=0.02)
    height = y1 - y2
    assert height > 50
    assert [y1 - y3, y1 - y5] == pytest.approx([height / 2, height / 4], abs=0.02)
    assert left_out(chart, record) == 1


def test_drawings_on_one_page_share_no_ids_and_hold_no_names(tmp_path: Path) -> None:
    evaluations = [metrics_line(0, "evaluation", reward=0.5), metrics_line(2, "evaluation", reward=0.6)]
    record = record_of(tmp_path, *evaluations, metrics_line(1, reward=1, kl=2), metrics_line(2, reward=2))
    charts = [Chart("A", "", {EVIL: "reward"}), Chart("B", "", {"$x$": "reward"})]
    drawings = [draw(chart, record) for chart in charts]
    ids = [set(re.findall(r' id="([^"]+)"', drawing)) for drawing in drawings]
    assert ids[0] & ids[1] == set()
    for drawing, own in zip(drawings, ids, strict=True):
        referred = set(re.findall(r'(?:url\(|href=")#([^")]+)', drawing))
        assert referred == own
        assert "alert" not in drawing
        assert "$" not in drawing
        assert "#0000" not in drawing, "a placeholder instead of the page's colour"


def test_a_single_step_and_an_evaluation_without_steps_can_be_drawn(tmp_path: Path) -> None:
    one = record_of(tmp_path / "a", metrics_line(1, time__update=2.0, loss=0.0))
    for chart in charts_of(one):
        assert "var(--c0)" in draw(chart, one)
    none = record_of(tmp_path / "b", metrics_line(0, "evaluation", accuracy=0.5))
    (chart,) = charts_of(none)
    assert "var(--c0)" in draw(chart, none)
    assert "<dt>steps</dt><dd>0</dd>" in render(none)


@pytest.mark.parametrize(("evaluations", "marked"), [(20, 20), (21, 0)])
def test_evaluations_are_marked_as_long_as_they_leave_room(
    tmp_path: Path, evaluations: int, marked: int
) -> None:
    lines = [metrics_line(step, "evaluation", accuracy=1) for step in range(evaluations)]
    assert len(marked_evaluations(record_of(tmp_path, metrics_line(1, loss=1), *lines))) == marked


# -- The page --------------------------------------------------------------------------------------------


def test_markup_in_what_the_run_holds_is_text_of_the_page(tmp_path: Path) -> None:
    run_folder(
        tmp_path,
        metrics_line(1, **{f"rewards__{EVIL.replace('/', '|')}__mean": 1.0}),
        rollouts=[scored(1.0, EVIL, EVIL, note=EVIL)],
        config=json.dumps({"model": {"path": EVIL}, "loss": {"name": EVIL, "x": EVIL}, "rewards": []}),
        versions=json.dumps({"versions": {EVIL: EVIL}, "git_commit": EVIL, "source": EVIL}),
        failure=json.dumps({"error": EVIL}),
    )
    page = Page(render(read_record(tmp_path)))
    assert page.count("script") == 1
    assert page.count("img") == 0
    for kind in ("completion", "prompt", "error"):
        assert page.text(kind) == [EVIL]
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]


def test_the_page_needs_no_network_and_allows_its_own_script_alone(tmp_path: Path) -> None:
    text = render(read_record(run_folder(tmp_path, rollouts=[scored(1.0)])))
    page = Page(text)
    targets = [
        value
        for _, attributes in page.elements
        for name, value in attributes.items()
        if name in ("src", "href", "xlink:href", "action", "srcset")
    ]
    assert targets
    assert all(target is not None and target.startswith("#") for target in targets)
    (policy,) = [a["content"] for tag, a in page.elements if a.get("http-equiv") == "Content-Security-Policy"]
    (script,) = re.findall(r"<script>(.*)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy is not None
    assert policy.startswith("default-src 'none';")
    assert f"script-src 'sha256-{digest}';" in policy


def test_a_folder_with_metrics_alone_has_a_page_that_says_what_is_missing(tmp_path: Path) -> None:
    text = render(read_record(run_folder(tmp_path / "bare")))
    for told in ("The run had no evaluation.", "No completions were saved", "The folder has no config.yaml."):
        assert told in text
    assert "it was still going on, or it was killed" in text
    assert Page(text).text("h1")[0].strip() == "bare"


def test_the_page_tells_the_numbers_of_the_run(tmp_path: Path) -> None:
    run_folder(
        tmp_path,
        metrics_line(0, "evaluation", accuracy=0.33149),
        metrics_line(1, reward=0.25, num_tokens=1000),
        metrics_line(40, reward=0.875, num_tokens=1234567),
        metrics_line(40, "evaluation", accuracy=0.9),
        rollouts=[scored(0.0, "three", note="carry"), scored(1.0, "four")],
        summary='{"train_seconds": 3725, "steps": 40}',
        config="loss: {name: dapo, path: null, clip_high: 0.28}\ntracking: {mlflow: {tags: {}}}\n",
        versions='{"versions": {"torch": "2.13.0"}, "git_commit": "abc", "source": "quickstart"}',
    )
    text = render(read_record(tmp_path))
    told = re.findall(r"<dt>(\w+)</dt><dd>([^<]*)</dd>", text)
    assert told == [
        ("accuracy", "0.331 → 0.9"),
        ("reward", "0.25 → 0.875"),
        ("steps", "40"),
        ("time", "1 h 02 min"),
        ("tokens", "1,234,567"),
    ]
    page = Page(text)
    assert page.text("completion") == ["four", "three"]
    assert page.text("tag best") == ["best"]
    assert page.text("tag worst") == ["worst"]
    assert "<td>loss</td><td><code>dapo</code></td><td>clip_high: 0.28</td>" in text
    assert "<td>observer</td><td><code>mlflow</code></td>" in text
    assert "<td>torch</td><td><code>2.13.0</code></td>" in text
    rows = re.findall(r'<code>evaluation/accuracy</code></td>(?:<td class="number">[^<]*</td>)+', text)
    assert re.findall(r">([\d.]+)<", rows[0]) == ["0.3315", "0.9", "0.3315", "0.9"]


def test_the_page_of_long_completions_stays_below_a_megabyte(tmp_path: Path) -> None:
    run_folder(tmp_path)
    rollouts = [scored(place / 40, "漢" * 5000, "字" * 3000) for place in range(40)]
    for step in range(1, 21):
        write_completions(tmp_path / "completions" / f"step_{step:06d}.parquet", step, rollouts)
    text = render(read_record(tmp_path))
    assert len(text.encode()) < 1_000_000
    assert len(Page(text).text("completion")) == MOST_BATCHES * MOST_SAMPLES
    assert "8 of 20 saved generation batches" in text
    assert "16 of 40 completions" in text


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (0.123456, "0.1235"),
        (-2.0, "\N{MINUS SIGN}2"),
        (27207.0, "27,207"),
        (math.nan, "nan"),
        (None, "\N{EN DASH}"),
        (-math.inf, "\N{MINUS SIGN}inf"),
    ],
)
def test_numbers_have_four_digits_and_whole_ones_are_whole(value: float | None, told: str) -> None:
    assert number(value) == told


def test_secrets_of_a_record_that_others_have_written_are_not_on_the_page(tmp_path: Path) -> None:
    config = (
        "rewards: [{name: judge, apiKey: hush}]\ntracking: {mlflow: {tracking_uri: 'http://me:hush@host'}}\n"
    )
    text = render(read_record(run_folder(tmp_path, config=config)))
    assert "hush" not in text
    assert "http://me:***@host" in text


# -- The end of a run ------------------------------------------------------------------------------------


class Tracker:
    """Looks for the report when the run ends, as a tracker that uploads it does."""

    found: bool | None = None

    @hookimpl
    def grpox_run_finished(self, run: RunContext) -> None:
        self.found = (run.output_dir / "report.html").exists()

    @hookimpl
    def grpox_run_failed(self, run: RunContext) -> None:
        self.found = (run.output_dir / "report.html").exists()


class Ending:
    """A run of `steps` steps, up to its end."""

    def __init__(self, folder: Path, steps: int) -> None:
        config = RunConfig.model_validate(
            {"model": {"path": "m"}, "data": {"path": "d.jsonl"}, "rewards": ["math"]}
        )
        self.run = RunContext(config, folder, 5, 1, {"grpox": "0.1.0"}, None, "run.yaml")
        self.tracker, self.output = Tracker(), LOGGED
        manager = pluggy.PluginManager("grpox")
        manager.add_hookspecs(hookspecs)
        report = RunReport()
        selected = [("record", LocalRecord()), ("tracker", self.tracker), ("run report", report)]
        self.observers = Observers(manager, selected)
        self.observers.run_started(self.run)
        for step in range(1, steps + 1):
            self.observers.rollouts_scored(self.run, step, [scored(1.0)])
            self.observers.step_finished(self.run, step, {"reward": 1.0})
        self.report = folder / "report.html"


def test_the_end_of_a_run_leaves_a_report_before_trackers_end_and_tells_where(tmp_path: Path) -> None:
    ending = Ending(tmp_path / "run", steps=2)
    (tmp_path / "run" / "summary.json").write_text('{"train_seconds": 1.0, "steps": 2}')
    ending.observers.run_finished(ending.run, {})
    assert Page(ending.report.read_text()).text("status finished") == ["finished"]
    assert ending.tracker.found
    assert ending.output.getvalue() == f"report: {ending.report}\n"
    assert not list(ending.report.parent.glob("*.unfinished"))


@pytest.mark.parametrize(("steps", "written"), [(0, False), (1, True)])
def test_a_failed_run_has_a_report_once_a_step_is_recorded(tmp_path: Path, steps: int, written: bool) -> None:
    ending = Ending(tmp_path / "run", steps)
    ending.observers.run_failed(ending.run, ValueError("loss is <nan>"))
    assert ending.tracker.found is written
    assert "warning" not in ending.output.getvalue()
    if written:
        assert Page(ending.report.read_text()).text("error") == ["ValueError: loss is <nan>"]


def test_a_report_that_cannot_be_written_does_not_hurt_the_run(tmp_path: Path) -> None:
    ending = Ending(tmp_path / "run", steps=1)
    (tmp_path / "run" / "completions" / "step_000001.parquet").write_text("no parquet")
    ending.observers.run_finished(ending.run, {})
    assert ending.tracker.found is False
    assert ending.observers.failures == {("run report", "grpox_run_finished"): 1}
    assert "warning: observer 'run report' failed" in ending.output.getvalue()


# -- grpox report ----------------------------------------------------------------------------------------


def test_the_command_writes_the_page_and_says_where(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    done = CliRunner().invoke(cli.app, ["report", str(folder)])
    assert (done.exit_code, done.output) == (0, f"{folder / 'report.html'}\n")
    other = tmp_path / "new" / "page.html"
    assert CliRunner().invoke(cli.app, ["report", str(folder), "--output", str(other)]).output == f"{other}\n"
    assert other.read_text().startswith("<!doctype html>")


def problem_of(*arguments: str) -> Any:
    error = CliRunner().invoke(cli.app, ["report", *arguments]).exception
    assert isinstance(error, ConfigError)
    assert error.exit_code == 2
    return error.problems[0]


def test_a_folder_that_is_no_runs_is_refused_with_the_nearest(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "quickstart")
    (run / "model").mkdir()
    missing = problem_of(str(tmp_path / "quikstart"))
    assert (missing.key, missing.what) == ("RUN_DIR", "there is no such folder")
    assert missing.nearest == str(run)
    around = problem_of(str(tmp_path))
    assert "metrics.jsonl is missing" in around.what
    assert around.allowed == str(run)
    assert problem_of(str(run / "model")).nearest == str(run)
    file = problem_of(str(run / "metrics.jsonl"))
    assert (file.what, file.nearest) == ("is a file: name the run's folder", str(run))


def test_a_run_without_a_step_and_an_output_that_is_a_folder_are_refused(tmp_path: Path) -> None:
    empty = run_folder(tmp_path / "empty", "\n")
    assert problem_of(str(empty)).what == "has no finished step and no evaluation"
    run = run_folder(tmp_path / "run")
    problem = problem_of(str(run), "--output", str(tmp_path))
    assert (problem.key, problem.what) == ("--output", "is a folder: name a file")
    (tmp_path / "file").write_text("")
    problem = problem_of(str(run), "--output", str(tmp_path / "file" / "report.html"))
    assert (problem.what, problem.given) == ("cannot be read or written: File exists", str(tmp_path / "file"))


def test_a_report_is_made_again_in_place_of_the_one_before(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    before = write_report(folder).read_text()
    (folder / "summary.json").write_text('{"train_seconds": 1.0}')
    assert "finished" in write_report(folder).read_text()
    assert 'class="status unfinished"' in before
