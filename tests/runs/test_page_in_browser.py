"""The page of a run in a real browser: served by `grpox watch`, and frozen as the report on a disk."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.chromium import MISSING, Browser, executable
from support.patience import patient
from support.services import end_group

from grpox.contracts import Episode, Rollout, ScoredRollout, Turn
from grpox.observing.page.report import write_comparison, write_report
from grpox.observing.record_files import write_completions
from grpox.observing.token_files import token_file, write_tokens
from grpox.policy.batch import TokenRecord
from grpox.update.token_metrics import TokenFacts

pytestmark = pytest.mark.skipif(executable() is None, reason=MISSING)

STEPS = 16
EVIL = "<img src=x onerror=alert(1)></script>\u202e"
CHARTS = [
    "Reward", "Accuracy", "Pass@k", "Success", "Info: calls", "Reward: a/b", "Loss", "Turns", "Calls of tools",
    "Tokens clipped",
]  # fmt: skip
"""Titles of the charts of `run_folder`."""
TOKENS = [
    {"text": " 42", "id": 7, "logprob": -math.log(2), "ratio": 1.5, "advantage": 0.5, "mask": 1, "turn": 0,
     "kind": "model", "entropy": 0.25, "policy_logprob": -0.28},
    {"text": "seen", "id": 8, "logprob": None, "ratio": None, "advantage": None, "mask": 0, "turn": None,
     "kind": "observation", "entropy": None, "policy_logprob": None},
    {"text": "", "special": "<|im_end|>", "id": 9, "logprob": -0.1, "ratio": 1.0, "advantage": -0.5, "mask": 1,
     "turn": 1, "kind": "model", "entropy": 0.5, "policy_logprob": -0.1},
]  # fmt: skip


def metrics_line(step: int, kind: str = "metrics", **values: Any) -> str:
    named = {name.replace("__", "/"): value for name, value in values.items()}
    return json.dumps({"step": step, "time": 1000.0 + 10 * step, kind: named}) + "\n"


def training_line(step: int) -> str:
    part = step / STEPS
    return metrics_line(
        step, reward=part, rewards__a__b__mean=part, loss="nan" if step == 5 else step - 6.5, epoch=0,
        clip_ratio__low_mean=part, clip_ratio__low_max=part, tools__add__calls=step, turns__mean=1 + part,
        episodes__success=part, info__calls=step, time__generate=2.0, time__update=part,
    )  # fmt: skip


def scored(place: int, prompt: str, completion: str, reward: float, answer: str) -> ScoredRollout:
    rollout = Rollout(place // 2, place % 2, (1,), (2, 3), "stop", 0)
    rewards = {"a/b": reward, "form": None}
    return ScoredRollout(rollout, prompt, completion, rewards, reward, reward - 0.5, {}, {"answer": answer})


def conversation() -> ScoredRollout:
    messages = ({"role": "user", "content": "Begin."}, {"role": "assistant", "content": "I am done."})
    episode = Episode("calculator", messages, (), rewards={"right": 1.0}, info={"calls": 1})
    rollout = Rollout(9, 0, (1,), (2, 3), "done", 0, None, (True, True), (Turn(0, 2, "stop", 0),), {}, episode)
    return ScoredRollout(rollout, "a game", "I am done.", {"a/b": 1.0}, 1.0, 0.5)


def run_folder(folder: Path, rate: float = 1e-5, is_finished: bool = True) -> Path:
    """A run of `STEPS` steps with two evaluations, two batches of completions and an alarm."""
    folder.mkdir(parents=True)
    lines = [training_line(step) for step in range(1, STEPS + 1)]
    for step, accuracy in ((0, 0.25), (STEPS, 0.75)):
        lines.append(metrics_line(step, "evaluation", accuracy=accuracy, pass_at_8=accuracy, success=accuracy))
    (folder / "metrics.jsonl").write_text("".join(lines))
    for step, last in ((1, "41"), (STEPS, "42")):
        rollouts = [
            scored(0, "What is 40 + 2?", last, float(last == "42"), "42"),
            scored(1, "What is 40 + 2?", "forty", 0.0, "42"),
            scored(2, EVIL, "a needle in " + EVIL, 0.25, EVIL),
            conversation(),
        ]
        write_completions(folder / "completions" / f"step_{step:06d}.parquet", step, rollouts)
    ones = np.ones(2, np.float32)
    facts = TokenFacts(
        TokenRecord(STEPS, 1, 0, 0, np.zeros(2, np.int32)),
        ids=np.array([7, 8], np.int32),
        is_scored=ones > 0,
        is_counted=ones > 0,
        sampler_logprob=-math.log(2) * ones,
        advantage=ones / 2,
        logprob=-ones,
        ratio=np.array([1, 1.25], np.float32),
        entropy=ones,
        correction=ones,
    )
    texts: Any = SimpleNamespace(of=lambda ids: [f"<{each}>" for each in ids], special=lambda token: None)
    write_tokens(token_file(folder, STEPS), [facts], texts)
    (folder / "config.yaml").write_text(f"loss: {{name: dapo}}\ntrain: {{learning_rate: {rate}}}\n")
    if is_finished:
        alarm = {"name": "kl_runaway", "step": 7, "value": 9.25, "metric": "kl"}
        (folder / "summary.json").write_text(json.dumps({"steps": STEPS, "alarms": [alarm]}))
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        browser.resize(1400, 1000)
        yield browser


@contextmanager
def served(folder: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Address of the page that the command serves of a run, and the command's process."""
    command = [sys.executable, "-m", "grpox", "watch", str(folder), "--no-browser"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip(), process
    finally:
        end_group(process.pid)
        process.wait(patient(30))
        process.stdout.close()


def open_page(browser: Browser, address: str) -> None:
    browser.open("about:blank")  # the page before no longer complains that its server is gone
    browser.complaints.clear()
    browser.open(address)
    browser.wait(lambda: browser.value("document.documentElement.dataset.ready"), "the page is not ready")


def show(browser: Browser, part: str) -> None:
    browser.value(f"""document.querySelector('nav a[href="#{part}"]').click()""")


def titles(browser: Browser) -> Any:
    return browser.value("[...document.querySelectorAll('#charts .title b')].map((title) => title.textContent)")


def data_of(browser: Browser, title: str) -> Any:
    """Values of a chart, of each curve at each step, as they are drawn."""
    chart = f"curves.drawn.find((drawn) => drawn.chart.title === '{title}').uplot"
    return browser.value(f"JSON.parse(JSON.stringify({chart}.data))")


def search_for(browser: Browser, text: str, rows: int) -> None:
    browser.value(f"byId('text').value = {json.dumps(text)}")
    browser.value("byId('text').dispatchEvent(new Event('input', { bubbles: true }))")
    shown = "document.querySelectorAll('#rows article').length"
    browser.wait(lambda: browser.value(shown) == rows, f"{text!r} does not find {rows} completions")


def test_the_served_page_has_curves_and_completions_and_the_report_has_the_same(
    browser: Browser, tmp_path: Path
) -> None:
    folder = run_folder(tmp_path / "run")
    with served(folder) as (address, _):
        open_page(browser, address)
        assert "token" not in browser.value("location.href")
        _shows_the_top_and_the_curves(browser)
        _zooms_and_tells_values(browser)
        live = [data_of(browser, title) for title in CHARTS]
        _smooths_and_has_a_log_axis(browser)
        show(browser, "completions")
        browser.wait(lambda: "8 completions" in browser.text, "the completions are not there")
        _searches_completions(browser)
        _shows_recorded_tokens(browser)
        _shows_tokens(browser)
        _shows_phases_and_config(browser)
        assert browser.complaints == []
    open_page(browser, write_report(folder, tmp_path / "moved.html").as_uri())
    _shows_the_top_and_the_curves(browser)
    assert [data_of(browser, title) for title in CHARTS] == live
    _zooms_and_tells_values(browser)
    show(browser, "completions")
    _searches_completions(browser)
    _shows_recorded_tokens(browser)
    _shows_phases_and_config(browser)
    assert "2 of 2 saved generation batches" in browser.value("byId('completions-remark').textContent")
    assert browser.complaints == []


def _shows_the_top_and_the_curves(browser: Browser) -> None:
    text = browser.text
    for fact in ("finished", "Alarm kl_runaway at step 7, value 9.25", "0.25 → 0.75", "0.0625 → 1"):
        assert fact in text, fact
    assert titles(browser) == CHARTS
    assert "1 not finite, left out" in text
    assert "1 more metric" in text
    assert "1 flat metric" in text
    # Of loss the steps, the values, and a gap at what is no number.
    steps, values = data_of(browser, "Loss")
    assert (steps, values[4], values[5]) == (list(range(1, STEPS + 1)), None, -0.5)
    # An evaluation is a curve of its own in the chart of the same measure.
    steps, sampled, held_out = data_of(browser, "Success")
    assert (steps[0], sampled[1], held_out[0], held_out[-1]) == (0, 1 / STEPS, 0.25, 0.75)
    # Nothing is wider than a telephone.
    browser.resize(400, 900, "dark")
    for part in ("completions", "time", "run", "curves"):
        show(browser, part)
        assert browser.value("document.documentElement.scrollWidth <= innerWidth"), part
    browser.resize(1400, 1000)


def _zooms_and_tells_values(browser: Browser) -> None:
    browser.value("document.querySelector('.u-over').scrollIntoView({ block: 'center' })")

    def at(step: float) -> tuple[float, float]:
        """The place of a step in the first chart."""
        left, top, width, height = browser.value(
            "(({ left, top, width, height }) => [left, top, width, height])"
            "(document.querySelector('.u-over').getBoundingClientRect())"
        )
        return left + width * (step - 1) / (STEPS - 1), top + height / 2

    def shows_step_7() -> bool:
        browser.mouse("mouseMoved", *at(5))
        browser.mouse("mouseMoved", *at(7.2))
        texts = browser.value(
            "[...document.querySelectorAll('#charts figcaption')].map((each) => each.innerText)"
        )
        reward, loss = texts[0], texts[CHARTS.index("Loss")]  # the second chart is not pointed at
        return "step 7" in reward and "0.4375" in reward and loss.strip().endswith("\n0.5")  # 7 / 16, 7 - 6.5

    browser.wait(shows_step_7, "the charts do not tell the values of the step")
    browser.mouse("mousePressed", *at(3.2), 1)
    browser.mouse("mouseMoved", *at(5), 1)
    browser.mouse("mouseMoved", *at(6.8), 1)
    browser.mouse("mouseReleased", *at(6.8), 1)
    scales = "curves.drawn.map((drawn) => [drawn.uplot.scales.x.min, drawn.uplot.scales.x.max])"
    browser.wait(lambda: all(pair == [3, 7] for pair in browser.value(scales)), "the charts are not zoomed")
    for clicks in (1, 2):
        browser.mouse("mousePressed", *at(5), clicks)
        browser.mouse("mouseReleased", *at(5), clicks)
    browser.wait(lambda: browser.value(scales)[0] == [1, STEPS], "a double click does not show all steps")


def _smooths_and_has_a_log_axis(browser: Browser) -> None:
    browser.value("byId('smoothing').value = 0.5; byId('smoothing').dispatchEvent(new Event('input'))")
    _, raw, smooth = data_of(browser, "Reward")
    assert raw[:2] == [1 / 16, 2 / 16]
    # (0.5 * 1/16 * 0.5 + 0.5 * 2/16) / (1 - 0.5 ** 2)
    assert smooth[:2] == pytest.approx([1 / 16, 1.25 / 16 / 0.75])
    browser.value("byId('smoothing').value = 0; byId('smoothing').dispatchEvent(new Event('input'))")
    browser.value("byId('log').click()")
    assert browser.value("curves.drawn[0].uplot.scales.y.distr") == 3
    assert data_of(browser, "Loss")[1][5:8] == [None, 0.5, 1.5]  # no place for -0.5
    browser.value("byId('log').click()")
    assert browser.value("curves.drawn[0].uplot.scales.y.distr") == 1


def _searches_completions(browser: Browser) -> None:
    search_for(browser, "NEEDLE", 2)
    assert browser.value("document.querySelector('#rows mark').textContent") == "needle"
    card = browser.value("document.querySelector('#rows article').innerText")
    assert f"a needle in {EVIL.replace(chr(0x202E), chr(92) + 'u202e')}" in card
    assert "answer" in card
    assert browser.value("document.querySelectorAll('main img, main script').length") == 0
    search_for(browser, "40 + 2", 4)
    browser.value("byId('reward-min').value = 1")
    search_for(browser, "40 + 2", 1)
    card = browser.value("document.querySelector('#rows article').innerText")
    for fact in ("reward 1", "advantage 0.5", "a/b 1", "form \N{EN DASH}", "step 16", "answer\n42"):
        assert fact in card, fact
    browser.value("document.querySelector('#search button[type=reset]').click()")
    search_for(browser, "i am done", 2)
    card = "document.querySelector('#rows article')"
    said = browser.value(f"[...{card}.querySelectorAll('.message')].map((message) => message.innerText)")
    assert said == ["user\nBegin.", "assistant\nI am done."]
    browser.value("byId('group').checked = true")
    search_for(browser, "", 3)
    prompts = browser.value("[...document.querySelectorAll('#rows article')].map((card) => card.innerText)")
    (asked,) = [prompt for prompt in prompts if "40 + 2" in prompt]
    assert "reward 0 → 0.5" in asked
    assert "4 completions · steps 1 to 16" in asked
    place = prompts.index(asked)
    browser.value(f"document.querySelectorAll('#rows article')[{place}].querySelector('button').click()")
    browser.wait(
        lambda: browser.value("byId('one-prompt').querySelectorAll('canvas').length"),
        "no chart",
    )
    assert browser.value("document.querySelectorAll('#rows article').length") == 4


def _shows_recorded_tokens(browser: Browser) -> None:
    browser.value("document.querySelector('#search button[type=reset]').click()")
    rows = "document.querySelectorAll('#rows article')"
    browser.wait(lambda: browser.value(f"{rows}.length") == 8, "not all completions are there")
    buttons = "document.querySelectorAll('#rows .show-tokens')"
    assert browser.value(f"{buttons}.length") == 1
    browser.value(f"{buttons}[0].click()")
    view = "document.querySelector('#rows .token-view')"
    browser.wait(lambda: browser.value(f"Boolean({view})"), "there is no token view")
    texts = browser.value(f"[...{view}.querySelectorAll('.token')].map((token) => token.textContent)")
    assert texts == ["<7>", "<8>"]
    browser.value(f"{view}.querySelectorAll('.token')[1].click()")
    facts = browser.value(f"{view}.querySelector('.facts').textContent")
    for fact in ("token 8", "ratio 1.25", "advantage 0.5", "log-probability \N{MINUS SIGN}0.6931"):
        assert fact in facts, facts
    browser.value(f"{buttons}[0].click()")


def _shows_tokens(browser: Browser) -> None:
    browser.value(f"document.querySelector('#rows article').append(tokenView({json.dumps(TOKENS)}))")
    view = "document.querySelector('.token-view')"
    colours = f"[...{view}.querySelectorAll('.token')].map((token) => token.style.background)"
    by_probability = browser.value(colours)
    assert by_probability[1] == ""  # nothing is known of what the model has not written
    choices = browser.value(f"[...{view}.querySelectorAll('option')].map((option) => option.value)")
    assert choices == ["probability", "advantage", "ratio", "entropy", "mask"]
    browser.value(f"{view}.querySelector('select').value = 'advantage'")
    browser.value(f"{view}.querySelector('select').dispatchEvent(new Event('change'))")
    assert browser.value(colours)[0] != by_probability[0]
    press = "dispatchEvent(new KeyboardEvent('keydown', { key: 'ArrowRight', bubbles: true }))"
    browser.value(f"{view}.querySelector('.tokens').{press}")
    facts = browser.value(f"{view}.querySelector('.facts').textContent")
    for fact in ('" 42"', "probability 0.5", "ratio 1.5", "advantage 0.5", "entropy 0.25", "mask 1"):
        assert fact in facts, fact
    labels = browser.value(f"[...{view}.querySelectorAll('.who')].map((label) => label.textContent)")
    assert labels == ["turn 1", "observation", "turn 2"]
    assert "<|im_end|>" in browser.value(f"{view}.innerText")


def _shows_phases_and_config(browser: Browser) -> None:
    show(browser, "time")
    browser.wait(lambda: "Step 16: 3 s" in browser.text, "the phases are not there")
    browser.value("byId('time-step').value = 8; byId('time-step').dispatchEvent(new Event('change'))")
    browser.wait(lambda: "Step 8: 2.5 s" in browser.text, "the step is not chosen")
    assert "80 %" in browser.text  # generate: 2 s
    show(browser, "run")
    browser.wait(lambda: "dapo" in browser.text, "the components are not there")
    show(browser, "curves")


def test_a_page_follows_a_run_and_says_that_the_server_is_gone(browser: Browser, tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", is_finished=False)
    with served(folder) as (address, process):
        open_page(browser, address)
        browser.value("byId('flat').open = true; setZoom([2, 6])")
        browser.value("scrollTo(0, 300)")
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(training_line(17))
        browser.wait(lambda: data_of(browser, "Reward")[0][-1] == 17, "the new step is not there")
        assert browser.value("[byId('flat').open, scrollY, curves.zoom]") == [True, 300, [2, 6]]
        assert browser.complaints == []
        process.terminate()
        browser.wait(lambda: browser.value("byId('live').textContent") == "server gone", "still live")


def test_several_runs_are_laid_over_each_other_with_what_differs(browser: Browser, tmp_path: Path) -> None:
    folders = [run_folder(tmp_path / name, rate) for name, rate in (("slow", 1e-5), ("fast", 2e-5))]
    open_page(browser, write_comparison(folders, tmp_path / "compared.html").as_uri())
    assert titles(browser) == CHARTS
    assert len(data_of(browser, "Loss")) == 1 + 2
    legend = browser.value("curves.drawn[0].legend.innerText")
    assert "slow" in legend
    assert "fast" in legend
    show(browser, "run")
    browser.wait(lambda: "train.learning_rate" in browser.text, "the differences are not there")
    rows = browser.value(
        "[...document.querySelectorAll('#differences tr')].map((row) => row.innerText.split('\\t'))"
    )
    assert rows[:2] == [["key", "slow", "fast"], ["train.learning_rate", "1e-05", "2e-05"]]
    assert ["evaluation/accuracy", "0.75", "0.75"] in rows
    browser.value("document.querySelector('#runs input').click()")
    show(browser, "curves")
    assert len(data_of(browser, "Loss")) == 1 + 1
    assert browser.complaints == []


def test_long_runs_show_all_phases_of_a_step_and_count_every_missing_value(
    browser: Browser, tmp_path: Path
) -> None:
    folders = []
    for name, rate in (("slow", 1e-5), ("fast", 2e-5)):
        lines = (
            metrics_line(
                step, loss="nan" if step in (600, 900) else step % 7, learning_rate=rate,
                time__a=1.0 + step % 5, time__b=2.0 + step % 3,
            )
            for step in range(1, 2001)
        )  # fmt: skip
        folders.append(tmp_path / name)
        folders[-1].mkdir()
        (folders[-1] / "metrics.jsonl").write_text("".join(lines))
    open_page(browser, write_comparison(folders, tmp_path / "compared.html").as_uri())
    assert titles(browser) == ["Loss", "Learning rate"]  # the same at every step, but not in every run
    assert "4 not finite" in browser.value("curves.drawn[0].note.textContent")
    show(browser, "time")
    steps = browser.value("FROZEN.answers.phases.slow.history.a[0]")
    browser.value(f"chooseStep({steps[100]})")
    total = 3 + steps[100] % 5 + steps[100] % 3
    browser.wait(lambda: f"Step {steps[100]}: {total} s" in browser.text, "the phases are not whole")
    left_out = next(step for step in range(1, 2001) if step not in steps)
    browser.value(f"chooseStep({left_out})")
    browser.wait(lambda: f"Step {left_out} is not in this report" in browser.text, "the step has a time")
    assert browser.complaints == []


def test_more_completions_are_the_next_ones_while_the_run_writes_others(
    browser: Browser, tmp_path: Path
) -> None:
    open_page(browser, write_report(run_folder(tmp_path / "run")).as_uri())
    ids = browser.value("""(async () => {
        const row = { prompt: "p", completion: "c" };
        const rows = Array.from({ length: 40 }, (_, place) => ({ ...row, id: 40 - place }));
        ask = async (_, { offset, limit }) =>
            ({ total: rows.length, rows: rows.slice(offset, offset + limit) });
        await search();
        rows.unshift(...[45, 44, 43, 42, 41].map((id) => ({ ...row, id })));
        await search(true);
        return [...document.querySelectorAll("#rows article")].map((card) => Number(card.dataset.id));
    })()""")
    assert ids == list(range(40, 0, -1))


def test_curves_of_machines_are_whole_and_long_completions_have_colours(
    browser: Browser, tmp_path: Path
) -> None:
    open_page(browser, write_report(run_folder(tmp_path / "run")).as_uri())
    merged = browser.value("""(() => {
        const run = { series: {} };
        merge(run, { series: { reward: [[1], [5]], "system/cpu": [[1], [50]] } });
        merge(run, { series: { reward: [[2], [6]], "system/cpu": [[1.5, 2], [50, 60]] } });
        return run.series;
    })()""")
    assert merged == {"reward": [[1, 2], [5, 6]], "system/cpu": [[1.5, 2], [50, 60]]}
    tokens = "Array.from({ length: 300000 }, (_, place) => ({ ratio: place % 3 }))"
    assert browser.value(f"strengths({tokens}, MEASURES.ratio).slice(0, 3)") == [-1, 0, 1]
