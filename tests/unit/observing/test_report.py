"""The report shows what the run's files hold, says what it leaves out, and obeys nothing written in them."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path
from typing import Any

import pluggy
import pytest
from support.contexts import context_of, scored
from support.frozen import answers_of, frozen_in
from support.logs import LOGGED
from support.watched_runs import metrics_line, record_tokens, token_facts
from typer.testing import CliRunner

from grpox.cli import app as cli
from grpox.contracts import Rollout, RunContext, ScoredRollout
from grpox.errors import ConfigError
from grpox.errors.formatting import spread
from grpox.observing.display import RunReport
from grpox.observing.observers import Observers
from grpox.observing.page.data import MOST_BATCHES, MOST_SAMPLES, Curve, binned, read_samples
from grpox.observing.page.document import document, embed
from grpox.observing.page.report import METRICS_BYTES, TOKENS_BYTES, render, write_comparison
from grpox.observing.page.server import WatchedRuns
from grpox.observing.page.source import number
from grpox.observing.record import LocalRecord
from grpox.observing.record_files import write_completions
from grpox.plugins import hookspecs
from grpox.plugins.hookspecs import hookimpl

EVIL = "</pre></script><script>alert(1)</script><img src=x onerror=alert(2)>{{ 7 * 7 }} & <b>4</b>"


def run_folder(folder: Path, *lines: str, rollouts: Sequence[ScoredRollout] = (), **files: str) -> Path:
    """A run's folder with these lines of metrics, completions of its first step, and other files by stem."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(lines or [metrics_line(1, {"reward": 0.5})]))
    if rollouts:
        write_completions(folder / "completions" / "step_000001.parquet", 1, rollouts)
    for stem, text in files.items():
        suffix = ".yaml" if stem == "config" else ".json"
        (folder / f"{stem}{suffix}").write_text(text)
    return folder


class Page(HTMLParser):
    """The elements of a page with their attributes, and the texts in elements of each name."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._open = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._open = tag

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        self.texts.setdefault(self._open, []).append(data)


def test_a_folder_whose_name_is_not_utf_8_has_a_report(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / os.fsdecode(b"run\xff"))
    result = CliRunner().invoke(cli.app, ["report", str(folder)])
    assert (result.exception, result.stdout) == (None, f"{tmp_path}/run\\xff/report.html\n")
    frozen = frozen_in((folder / "report.html").read_text(encoding="utf-8"))
    assert frozen["runs"][0]["name"] == "run\\xff"
    runs = WatchedRuns([folder])
    assert runs.source(runs.runs()[0]["name"]).folder == folder
    assert document({"text": "half \ud83d"}, "half \ud83d").encode()


def test_of_a_batch_the_best_and_the_worst_are_shown_and_what_has_no_reward_last(tmp_path: Path) -> None:
    rewards = [0.01 * place for place in range(99)] + [math.nan, 7.0]
    run_folder(tmp_path, rollouts=[scored(reward) for reward in reversed(rewards)])
    ((batch,), saved) = read_samples(tmp_path)
    assert (saved, batch.total, len(batch.rows)) == (1, 101, MOST_SAMPLES)
    assert (batch.best, batch.worst) == (7.0, 0.0)
    assert batch.mean == pytest.approx((0.01 * 98 * 99 / 2 + 7) / 100)
    shown = [row["reward"] for row in batch.rows]
    assert (shown[0], shown[-1]) == (7.0, None)
    assert shown[:-1] == sorted(shown[:-1], reverse=True)
    # Places are spread evenly from the first to the last.
    assert [spread(count, 8) for count in (0, 1, 3)] == [[], [0], [0, 1, 2]]
    assert spread(5, 1) == [2]
    assert spread(12, 4) == [0, 4, 7, 11]  # 11 / 3 = 3.67 apart
    assert spread(256, 3) == [0, 128, 255]  # 255 / 2 = 127.5, rounded to even


def test_batches_follow_the_run_and_long_texts_are_cut_in_the_middle(tmp_path: Path) -> None:
    text = "a" * 900 + "b" * 1000 + "c" * 800
    run_folder(tmp_path, rollouts=[scored(1.0, text, "\x1b[2J\u202e\n\tü")])
    ((batch,), _) = read_samples(tmp_path)
    assert batch.rows[0]["completion"] == "a" * 800 + "\n[... 1100 characters ...]\n" + "c" * 800
    assert batch.rows[0]["prompt"] == "\\x1b[2J\\u202e\n\tü"
    for name in ("step_1000000", "step_000002_2", "step_999999", "step_000002", "notes"):
        write_completions(tmp_path / "completions" / f"{name}.parquet", 1, [scored(1.0)])
    batches, saved = read_samples(tmp_path)
    labels = ["step 1", "step 2", "step 2, batch 2", "step 999999", "step 1000000"]
    assert ([batch.label for batch in batches], saved) == (labels, 5)


def test_neighbouring_steps_become_one_point_where_there_are_too_many() -> None:
    curve = Curve([1, 2, 3, 4, 5], [1.0, math.nan, 5.0, math.nan, math.nan])
    short = binned(curve, most=2)
    # Three steps a point: (1 + 5) / 2, and nothing finite.
    assert short.steps == [2.0, 4.5]
    assert short.values == pytest.approx([3.0, math.nan], nan_ok=True)
    assert binned(curve, most=5) is curve


def test_an_evaluation_alone_has_its_curve_and_metrics_alone_a_page(tmp_path: Path) -> None:
    none = answers_of(run_folder(tmp_path / "bare", metrics_line(0, {"accuracy": 0.5}, "evaluation")))
    assert none["metrics"]["series"] == {"evaluation/accuracy": [[0], [0.5]]}
    run = none["run"]
    assert ["steps", "0", "of the optimizer"] in run["tiles"]
    assert (run["source"], run["status"], run["config"], run["components"]) == ("bare", "unfinished", "", [])
    assert none["completions"]["rows"] == []


def test_curves_of_a_long_run_keep_their_ends_and_extremes_in_few_bytes(tmp_path: Path) -> None:
    names = [f"info/{letter * 3}" for letter in "abcdefghijklmnopqrstuvwxyz"]
    values = [math.sin(step) + (step == 777) * 50 for step in range(1, 2001)]
    lines = [metrics_line(step, dict.fromkeys(names, value)) for step, value in enumerate(values, 1)]
    metrics = answers_of(run_folder(tmp_path, *lines))["metrics"]
    assert len(json.dumps(metrics)) < METRICS_BYTES
    for name in names:
        steps, values = metrics["series"][name]
        assert (steps[0], steps[-1]) == (1, 2000)
        assert max(values) == pytest.approx(50 + math.sin(777), rel=1e-5)


def test_markup_in_what_the_run_holds_is_text_of_the_page(tmp_path: Path) -> None:
    run_folder(
        tmp_path,
        metrics_line(1, {f"rewards/{EVIL.replace('/', '|')}/mean": 1.0}),
        rollouts=[scored(1.0, EVIL, EVIL, extra={"note": EVIL})],
        config=json.dumps({"model": {"path": EVIL}, "loss": {"name": EVIL, "x": EVIL}, "rewards": []}),
        versions=json.dumps({"versions": {EVIL: EVIL}, "git_commit": EVIL, "source": EVIL}),
        failure=json.dumps({"error": EVIL}),
    )
    text = render([tmp_path])
    page = Page(text)
    tags = [tag for tag, _ in page.elements]
    # The scripts are the data, uPlot and the page's own.
    assert (tags.count("script"), tags.count("img"), "<!--" in text) == (3, 0, False)
    answers = {name: next(iter(of.values())) for name, of in frozen_in(text)["answers"].items()}
    (row,) = answers["completions"]["rows"]
    assert (row["completion"], row["prompt"], row["extra"]) == (EVIL, EVIL, {"note": EVIL})
    assert answers["run"]["error"] == EVIL
    assert answers["run"]["versions"] == {EVIL: EVIL}
    assert page.texts["title"] == [f"{EVIL} \N{EN DASH} grpox"]
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]


def test_texts_neither_end_their_element_nor_hide_from_a_reader_nor_are_replaced() -> None:
    for text in ("</script>", "<!--<script>", "]]>&lt;", "\u2028\u2029", "\x1b[2J\u202e"):
        written = embed({text: [text]})
        assert json.loads(written) == {text: [text]}
        assert not re.search("[<>&\u2028\u2029\u202e\x1b]", written)
    assert "{{ scripts }}" in document({"made": "{{ scripts }}"}, title="{{ scripts }}")


def test_no_script_of_the_page_writes_markup_and_uplot_is_the_one_that_its_record_names() -> None:
    (own,) = [script for script in Page(document()).texts["script"] if "FROZEN" in script]
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", own)
    vendor = resources.files("grpox.observing.page") / "vendor"
    record = json.loads((vendor / "vendor.json").read_text())
    hashes = {
        entry.name: hashlib.sha256(entry.read_bytes()).hexdigest()
        for entry in vendor.iterdir()
        if entry.name != "vendor.json"
    }
    assert hashes == record["files"]
    assert hashes.keys() == {"uPlot.iife.min.js", "uPlot.min.css", "LICENSE"}
    assert f"(v{record['version']})" in (vendor / "uPlot.iife.min.js").read_text()[:200]
    assert record["url"].endswith(f"/uplot-{record['version']}.tgz")


def test_the_page_needs_no_network_and_allows_its_own_scripts_and_styles_alone(tmp_path: Path) -> None:
    text = render([run_folder(tmp_path, rollouts=[scored(1.0)])])
    page = Page(text)
    attributes = [pair for _, of_element in page.elements for pair in of_element.items()]
    targets = [value for name, value in attributes if name in ("src", "href", "xlink:href", "action", "srcset")]
    assert targets
    assert all(target is not None and target.startswith("#") for target in targets)
    assert "style" not in dict(attributes)
    (policy,) = [a["content"] for tag, a in page.elements if a.get("http-equiv") == "Content-Security-Policy"]
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    (style,) = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    hashes = [
        f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
        for content in (*scripts, style)
    ]
    assert policy == (
        f"default-src 'none'; style-src {hashes[-1]}; script-src {' '.join(hashes[:-1])}; "
        "connect-src 'none'; base-uri 'none'; form-action 'none'"
    )
    assert ("connect-src 'self'" in document(), 'id="frozen"' in document()) == (True, False)


def test_pages_of_long_completions_stay_below_a_megabyte(tmp_path: Path) -> None:
    folders = [run_folder(tmp_path / name) for name in ("a", "b", "c")]
    rollouts = [scored(place / 40, "漢" * 5000, "字" * 3000) for place in range(40)]
    for step in range(1, 21):
        for folder in folders:
            write_completions(folder / "completions" / f"step_{step:06d}.parquet", step, rollouts)
    text = render(folders[:1])
    assert len(text.encode()) < 1_000_000
    (shown,) = frozen_in(text)["answers"]["completions"].values()
    assert len(shown["rows"]) == MOST_BATCHES * MOST_SAMPLES
    assert "8 of 20 saved generation batches" in shown["remark"][0]
    assert shown["batches"][0][:3] == ["step 1", 16, 40]
    assert "\n[... 2600 characters ...]\n" in shown["rows"][0]["prompt"]
    text = write_comparison(folders, tmp_path / "page.html").read_text()
    assert len(text.encode()) < 1_200_000
    answers = frozen_in(text)["answers"]["completions"]
    assert {name: len(answer["rows"]) for name, answer in answers.items()} == {"a": 32, "b": 32, "c": 32}
    assert {row["extreme"] for row in answers["a"]["rows"]} >= {"best", "worst"}


def run_with_tokens(folder: Path, count: int) -> Path:
    """A run whose batch of 40 completions has the tokens of samples 2 and 39, of which the page shows one."""
    samples = [Rollout(0, place, (1,), (2, 3), "stop", 0) for place in range(40)]
    run_folder(folder, rollouts=[scored(each.sample / 40, rollout=each) for each in samples])
    facts = [token_facts(1, sample=each, ids=range(each, each + count)) for each in (2, 39)]
    for fact in facts:
        fact.sampler_logprob[:] /= 3
    record_tokens(folder, 1, *facts)
    return folder


def test_recorded_tokens_are_on_the_page_and_their_completions_too(tmp_path: Path) -> None:
    folder = run_with_tokens(tmp_path / "run", 3)
    answers = frozen_in(render([folder]))["answers"]
    rows = answers["completions"]["run"]["rows"]
    assert len(rows) == MOST_SAMPLES + 1
    assert [row["sample"] for row in rows if row["has_tokens"]] == [39, 2]
    tokens = answers["tokens"]["run"]
    assert list(tokens) == ["step_000001:39", "step_000001:2"]
    columns = tokens["step_000001:2"]["columns"]
    assert tokens["step_000001:2"]["count"] == 3
    assert (columns["id"], columns["text"]) == ([2, 3, 4], ["<2>", "<3>", "<4>"])
    assert (columns["logprob"], columns["ratio"]) == ([0.0, None, -0.6667], [1.0, None, 3.0])
    assert (columns["kind"], columns["special"]) == (["model", "observation", "model"], None)
    assert len(answers["completions"]["run"]["remark"]) == 2


def test_tokens_that_the_page_does_not_hold_are_counted(tmp_path: Path) -> None:
    folder = run_with_tokens(tmp_path / "run", TOKENS_BYTES // 100)
    answers = frozen_in(render([folder]))["answers"]
    assert list(answers["tokens"]["run"]) == ["step_000001:2"]
    completions = answers["completions"]["run"]
    assert [row["sample"] for row in completions["rows"] if row["has_tokens"]] == [2]
    assert completions["remark"][2].startswith("Tokens of 1 of the 2 recorded completions")
    run_with_tokens(folder, TOKENS_BYTES // 4)
    assert frozen_in(render([folder]))["answers"]["tokens"]["run"] == {}


def test_runs_on_one_page_have_names_of_their_own_and_the_keys_that_differ(tmp_path: Path) -> None:
    config = "loss: {name: dapo}\ntrain: {learning_rate: %s}\noutput_dir: %s\n"
    folders = [
        run_folder(tmp_path / name, config=config % (rate, name))
        for name, rate in (("x/run", "1.0e-5"), ("y/run", "2.0e-5"))
    ]
    (tmp_path / "y" / "run" / "config.yaml").write_text(config % ("2.0e-5", "y") + "seed: 3\n")
    frozen = frozen_in(render(folders))
    names = [str(folder) for folder in folders]
    assert [run["name"] for run in frozen["runs"]] == names
    assert frozen["answers"]["compare"] == {
        "runs": names, "keys": [["train.learning_rate", ["1e-05", "2e-05"]], ["seed", [None, "3"]]],
    }  # fmt: skip
    alone = frozen_in(render(folders[:1]))
    assert ([run["name"] for run in alone["runs"]], "compare" in alone["answers"]) == (["run"], False)


def test_numbers_have_four_digits_and_whole_ones_are_whole() -> None:
    assert [number(value) for value in (0.123456, 27207.0, math.nan)] == ["0.1235", "27,207", "nan"]
    assert [number(value) for value in (-2.0, -math.inf)] == ["\N{MINUS SIGN}2", "\N{MINUS SIGN}inf"]
    assert number(None) == "\N{EN DASH}"


def test_secrets_of_a_record_that_others_have_written_are_not_on_the_page(tmp_path: Path) -> None:
    tracking = "{mlflow: {tracking_uri: 'http://me:hush@host'}}"
    config = f"rewards: [{{name: judge, apiKey: hush}}]\ntracking: {tracking}\n"
    text = render([run_folder(tmp_path, config=config)])
    assert ("hush" in text, "http://me:***@host" in text) == (False, True)


class Tracker:
    """Looks for the report when the run ends, as a tracker that uploads it does."""

    found: bool | None = None

    @hookimpl
    def grpox_run_finished(self, run: RunContext) -> None:
        self.found = (run.output_dir / "report.html").exists()

    grpox_run_failed = grpox_run_finished


class Ending:
    """A run of `steps` steps, up to its end."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.run = context_of(folder, 5)
        self.tracker, self.report = Tracker(), folder / "report.html"
        manager = pluggy.PluginManager("grpox")
        manager.add_hookspecs(hookspecs)
        selected = [("record", LocalRecord()), ("tracker", self.tracker), ("run report", RunReport())]
        self.observers = Observers(manager, selected)
        self.observers.run_started(self.run)
        for step in range(1, steps + 1):
            self.observers.rollouts_scored(self.run, step, [scored(1.0)])
            self.observers.step_finished(self.run, step, {"reward": 1.0})

    @property
    def answer(self) -> Any:
        """The answer of the report about the run."""
        (run,) = frozen_in(self.report.read_text())["answers"]["run"].values()
        return run


def test_the_end_of_a_run_leaves_a_report_before_trackers_end_and_tells_where(tmp_path: Path) -> None:
    ending = Ending(tmp_path / "run", steps=2)
    (tmp_path / "run" / "summary.json").write_text('{"train_seconds": 1.0, "steps": 2}')
    ending.observers.run_finished(ending.run, {})
    assert ending.answer["status"] == "finished"
    assert ending.tracker.found
    assert LOGGED.getvalue() == f"report: {ending.report}\n"
    assert not list(ending.report.parent.glob("*.unfinished"))


@pytest.mark.parametrize(
    ("steps", "broken", "written"), [(0, False, False), (1, False, True), (1, True, False)]
)
def test_a_failed_run_has_a_report_once_a_step_is_recorded(
    tmp_path: Path, steps: int, broken: bool, written: bool
) -> None:
    """A report that cannot be written does not hurt the run."""
    ending = Ending(tmp_path / "run", steps)
    if broken:
        (tmp_path / "run" / "completions" / "step_000001.parquet").write_text("no parquet")
    ending.observers.run_failed(ending.run, ValueError("loss is <nan>"))
    assert ending.tracker.found is written
    assert ending.observers.failures == ({("run report", "grpox_run_failed"): 1} if broken else {})
    assert ("warning: observer 'run report' failed" in LOGGED.getvalue()) == broken
    if written:
        run = ending.answer
        assert (run["status"], run["error"]) == ("failed", "ValueError: loss is <nan>")


def test_the_command_writes_the_page_again_and_says_where(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    for status in ("unfinished", "finished"):
        done = CliRunner().invoke(cli.app, ["report", str(folder)])
        assert (done.exit_code, done.output) == (0, f"{folder / 'report.html'}\n")
        (run,) = frozen_in((folder / "report.html").read_text())["answers"]["run"].values()
        assert run["status"] == status
        (folder / "summary.json").write_text('{"train_seconds": 1.0}')
    other = tmp_path / "new" / "page.html"
    assert CliRunner().invoke(cli.app, ["report", str(folder), "--output", str(other)]).output == f"{other}\n"
    assert other.read_text().startswith("<!doctype html>")


def problem_of(*arguments: object) -> Any:
    error = CliRunner().invoke(cli.app, ["report", *map(str, arguments)]).exception
    assert isinstance(error, ConfigError)
    assert error.exit_code == 2
    return error.problems[0]


def test_a_folder_that_is_no_runs_and_an_output_that_is_a_folder_are_refused(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "quickstart")
    (run / "model").mkdir()
    missing = problem_of(tmp_path / "quikstart")
    assert (missing.key, missing.what, missing.nearest) == ("RUN_DIR", "there is no such folder", str(run))
    around = problem_of(tmp_path)
    assert ("metrics.jsonl is missing" in around.what, around.allowed) == (True, str(run))
    assert problem_of(run / "model").nearest == str(run)
    file = problem_of(run / "metrics.jsonl")
    assert (file.what, file.nearest) == ("is a file: name the run's folder", str(run))
    empty = problem_of(run_folder(tmp_path / "empty", "\n"))
    assert empty.what == "has no finished step and no evaluation"
    problem = problem_of(run, "--output", tmp_path)
    assert (problem.key, problem.what) == ("--output", "is a folder: name a file")
    problem = problem_of(run, "--output", run / "metrics.jsonl" / "report.html")
    assert problem.what == "cannot be read or written: File exists"
    assert problem.given == str(run / "metrics.jsonl")
