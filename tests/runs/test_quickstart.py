"""The bundled quickstart, whole, as a new user starts it: it learns, and leaves what it says it leaves."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from mlflow import MlflowClient
from support import processes
from support.frozen import frozen_in
from support.run_files import completions_of, metrics_of, summary_of
from transformers import AutoModelForCausalLM, AutoTokenizer

STEPS = 100


@pytest.fixture(scope="module")
def run(finished_quickstart):
    return finished_quickstart


@pytest.fixture(scope="module")
def output(run):
    return run.output


@pytest.fixture(scope="module")
def grpox(run):
    """`grpox(*arguments)` beside the run, for commands that only read."""

    def grpox(*arguments):
        env = {"MLFLOW_TRACKING_URI": None}
        return processes.run("-m", "grpox", *arguments, cwd=run.folder, env=env)

    return grpox


@pytest.fixture(scope="module")
def recorded(output):
    return dict(enumerate(metrics_of(output), start=1))


@pytest.fixture(scope="module")
def tracked(run):
    client = MlflowClient(f"sqlite:///{run.folder}/mlflow.db")
    (experiment,) = [e for e in client.search_experiments() if e.name == "grpox-quickstart"]
    (mlflow_run,) = client.search_runs([experiment.experiment_id])
    return client, mlflow_run


def test_held_out_accuracy_rises_from_mostly_wrong_to_mostly_right(run, output, recorded):
    summary = summary_of(output)
    assert summary["accuracy_before"] <= 0.40
    assert summary["accuracy_after"] >= 0.90
    for accuracy in (summary["accuracy_before"], summary["accuracy_after"]):
        assert f"{accuracy:.4f}" in run.stdout
    assert "Traceback" not in run.stdout + run.stderr
    assert summary["steps"] == len(recorded) == STEPS
    assert summary["train_seconds"] > 0
    losses = [metrics["loss"] for metrics in recorded.values()]
    assert summary["training_loss"] == pytest.approx(sum(losses) / STEPS)
    assert summary["alarms"] == []


def test_the_report_shows_the_run_and_is_in_mlflow(run, output, tracked, grpox, tmp_path):
    report = output / "report.html"
    text = report.read_text(encoding="utf-8")
    summary = summary_of(output)
    answers = {name: each[output.name] for name, each in frozen_in(text)["answers"].items()}
    accuracy = f"{summary['accuracy_before']:.3g} → {summary['accuracy_after']:.3g}"
    assert ["accuracy", accuracy] in [tile[:2] for tile in answers["run"]["tiles"]]
    assert answers["run"]["status"] == "finished"
    shown = Counter(row["step"] for row in answers["completions"]["rows"])
    assert len(shown) == 8
    assert all(16 <= rows <= 16 + 8 for rows in shown.values())  # those whose tokens are recorded come on top
    assert all(row["data"]["answer"].isdigit() for row in answers["completions"]["rows"])
    assert len(text.encode()) < 1_000_000
    assert "INFO rank 0 grpox.observing.display: report: runs/quickstart/report.html\n" in run.stderr
    assert "mlflow ui --backend-store-uri sqlite:///mlflow.db\n" in run.stderr
    client, mlflow_run = tracked
    stored = client.download_artifacts(mlflow_run.info.run_id, "report.html", str(tmp_path))
    assert Path(stored).read_text(encoding="utf-8") == text
    made = tmp_path / "again.html"
    again = grpox("report", "runs/quickstart", "--output", str(made))
    assert (again.returncode, again.stdout) == (0, f"{made}\n"), again.stderr

    def but_when_it_was_made(page):
        return re.sub(r'"made": ?"[^"]*"|report made [^<]*', "", page)

    assert but_when_it_was_made(made.read_text("utf-8")) == but_when_it_was_made(text)


def test_every_step_is_recorded_and_on_policy(recorded):
    for metrics in recorded.values():
        assert (metrics["ratio/min"], metrics["ratio/max"], metrics["kl_old"]) == (1, 1, 0)
        assert metrics["sampling/difference_max"] < 1e-4
        assert metrics["completions/max_length"] <= 4


def test_mlflow_holds_the_finished_run_with_every_value(recorded, tracked):
    client, run = tracked
    assert run.info.status == "FINISHED"
    for name in ("reward", "loss", "grad_norm", "entropy", "tokens_per_second/generated", "time/update"):
        history = {m.step: m.value for m in client.get_metric_history(run.info.run_id, name)}
        assert history == {step: metrics[name] for step, metrics in recorded.items()}


def test_grpox_runs_reads_the_finished_run_back(run, grpox, output, tracked):
    summary = summary_of(output)
    accuracy = f"accuracy {summary['accuracy_before']:.4g} -> {summary['accuracy_after']:.4g}"
    listed = grpox("runs", "list", "--json")
    assert listed.returncode == 0, listed.stderr
    (told,) = json.loads(listed.stdout)
    assert (told["status"], told["steps"], told["total_steps"]) == ("FINISHED", STEPS, STEPS)
    assert accuracy in " ".join(grpox("runs", "list").stdout.split())
    shown = json.loads(grpox("runs", "show", "runs/quickstart", "--json").stdout)
    assert shown["run_id"] == tracked[1].info.run_id
    assert shown["metrics"]["evaluation/accuracy"]["last"]["value"] == summary["accuracy_after"]
    # The run file says 0.2 for clip_low, which is the default.
    assert shown["params"]["loss.clip_high"] == "0.28"
    assert "loss.clip_low" not in shown["params"]
    assert shown["artifacts"]["completions"] == STEPS


def test_completions_are_browsable(output):
    assert len(list((output / "completions").glob("*.parquet"))) == STEPS
    rows = completions_of(output, 1)
    assert len(rows) == 256
    assert len({row["prompt"] for row in rows if row["group"] == 0}) == 1
    for row in rows:
        a, b = row["prompt"].rstrip("=").split("+")
        # A completion that never ended is decoded like one that did: right digits alone do not earn it.
        assert row["rewards/exact"] == float(row["completion"] == str(int(a) + int(b)))


def test_the_trained_model_loads_in_plain_transformers_and_adds(output):
    model = AutoModelForCausalLM.from_pretrained(output / "model")
    tokenizer = AutoTokenizer.from_pretrained(output / "model")
    problems = [(37, 48), (25, 67), (8, 9), (50, 49), (46, 46), (77, 18), (13, 38), (64, 17)]
    inputs = tokenizer([f"{a}+{b}=" for a, b in problems], return_tensors="pt", padding=True)
    with torch.no_grad():
        answers = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    texts = tokenizer.batch_decode(answers[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    right = [text == str(a + b) for text, (a, b) in zip(texts, problems, strict=True)]
    assert sum(right) >= 6
