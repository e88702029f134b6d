"""Sampling during the update with real servers: it learns, its samples are one batch old, and it can go on."""

import json
import shutil
import threading
import time
from importlib import util

import pytest
from pyarrow import parquet
from support.killing import kill, start, wait_for_steps
from support.vllm_serving import borrowed

from grpox_generators.configs import LONGEST_WAIT

pytestmark = [
    pytest.mark.skipif(util.find_spec("vllm") is None, reason="vLLM is not installed (make vllm)"),
]


@pytest.fixture(scope="module")
def server():
    """One of the session's two servers of the quickstart's model."""
    with borrowed(1) as [taken]:
        yield taken


def settings(server, name, ranks=1):
    return (
        f"generator={{name: vllm-server, urls: [{server.url}], start_timeout: {LONGEST_WAIT}}}",
        f"train.per_device_train_batch_size={256 // ranks}",
        "train.max_staleness=1",
        "evaluation=null",
        "tracking={}",
        f"output_dir=runs/{name}",
    )


def completions_of(run, step):
    return parquet.read_table(run / "completions" / f"step_{step:06d}.parquet")


@pytest.mark.parametrize("ranks", [1, 2])
def test_it_learns_from_samples_that_are_one_batch_old(server, grpox, folder, ranks):
    name = f"ahead-{ranks}"
    done = grpox("train", "quickstart", *settings(server, name, ranks), "train.max_steps=25", ranks=ranks)
    assert done.returncode == 0, done.stderr[-3000:]
    run = folder / "runs" / name
    metrics = [json.loads(line)["metrics"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert metrics[-1]["reward"] > metrics[0]["reward"] + 0.2
    assert [step["sampling/staleness"] for step in metrics] == [0, *[1] * 24]
    versions = [set(completions_of(run, step)["policy_version"].to_pylist()) for step in range(1, 26)]
    assert versions == [{0}, *({step} for step in range(24))]
    # The samples of the first step are the policy's own; those of later ones are corrected.
    assert metrics[0]["sampling/difference_max"] < 1e-4
    assert all(step["sampling/effective_sample_size"] > 0.5 for step in metrics)
    assert "warning" not in done.stderr


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_was_killed_goes_on_with_what_was_begun(server, tmp_path, ranks):
    """Also on one rank in place of two: the samples after the checkpoint are those of before it."""
    overrides = settings(server, "killed", 2), "train.max_steps=8", "checkpoint.every=3"
    process = start(tmp_path, "quickstart", *overrides[0], *overrides[1:], ranks=2)
    run = tmp_path / "runs" / "killed"
    assert wait_for_steps(process, run, 5), process.communicate()[1]
    kill(process)
    shutil.rmtree(run / "checkpoints" / "step-00000006", ignore_errors=True)
    before = [completions_of(run, step) for step in (4, 5)]
    for path in (run / "completions").glob("step_00000[4-9].parquet"):
        path.unlink()
    split = [f"train.per_device_train_batch_size={256 // ranks}"]
    process = start(tmp_path, "--resume", "runs/killed", *split, ranks=ranks)
    assert process.wait() == 0, process.communicate()[1]
    after = [completions_of(run, step) for step in (4, 5)]
    assert set(before[0]["policy_version"].to_pylist()) == {2}
    assert before[0].equals(after[0])
    if ranks == 2:
        drawn = [table.select(["group", "sample", "policy_version"]) for table in (before[1], after[1])]
        assert drawn[0].equals(drawn[1])


def test_a_server_that_is_lost_during_the_update(server, grpox, folder):
    """With two ranks: what it had not sampled is sampled when it is back, by the weights of then."""
    done = []
    overrides = *settings(server, "lost", 2), "train.max_steps=6"
    run = threading.Thread(target=lambda: done.append(grpox("train", "quickstart", *overrides, ranks=2)))
    run.start()
    metrics = folder / "runs" / "lost" / "metrics.jsonl"
    while run.is_alive() and (not metrics.exists() or len(metrics.read_text().splitlines()) < 2):
        time.sleep(0.02)
    server.kill()
    server.start()
    run.join()
    server.wait_until_ready()
    assert done[0].returncode == 0, done[0].stderr[-3000:]
    assert "lost a server" in done[0].stderr
    tables = [completions_of(folder / "runs" / "lost", step) for step in range(1, 7)]
    assert [table.num_rows for table in tables] == [256] * 6
    for step, table in enumerate(tables[1:], start=2):
        assert set(table["policy_version"].to_pylist()) <= {step - 2, step - 1}
