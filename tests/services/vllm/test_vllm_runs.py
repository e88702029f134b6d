"""Runs with vLLM in the process or on servers: they learn, sample during the update, and survive losses."""

import json
import shutil
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest
from pyarrow import parquet
from support.generator_line import assert_learned, run_file
from support.killing import kill, start, wait_for_steps
from support.services import wait_until
from support.vllm_serving import NEEDS_VLLM, borrowed

from grpox_generators.configs import LONGEST_WAIT

pytestmark = NEEDS_VLLM


@pytest.fixture(scope="module")
def servers():
    """The session's two servers of the quickstart's model."""
    with borrowed(2) as both:
        yield both


@pytest.fixture
def killed_run():
    """Shared memory by vLLM's own names, as a killed run leaves it, and as a run beside this one has it."""
    left = [Path(f"/dev/shm/-tp:0-[0-1]-cpushm_{rank}") for rank in range(2)]
    for segment in left:
        segment.write_bytes(b"")
    yield
    for segment in left:
        segment.unlink()


def shared_memory():
    return {path.name for path in Path("/dev/shm").glob("*cpushm*")}


@pytest.mark.parametrize(
    ("line", "ranks"),
    [
        ("hf", 1),
        ("vllm-server", 1),
        ("vllm-colocate", 1),
        ("vllm-colocate", 2),
        ("{name: vllm-colocate, tensor_parallel_size: 2}", 2),
    ],
)
def test_a_run_learns_with_nothing_but_the_line_of_the_generator_changed(
    line, ranks, request, grpox, folder, killed_run
):
    before, output = shared_memory(), folder / "runs" / f"{ranks}-{len(line)}"
    if line == "vllm-server":
        urls = [server.url for server in request.getfixturevalue("servers")]
        line = json.dumps({"name": line, "urls": urls})
    (folder / "run.yaml").write_text(run_file(line, output), encoding="utf-8")
    share = f"train.per_device_train_batch_size={256 // ranks}"
    done = grpox("train", "run.yaml", share, ranks=ranks, vllm="colocate" in line)
    assert done.returncode == 0, done.stderr[-3000:]
    assert_learned(output, "none" if line == "hf" else "token-truncate")
    # A run beside this has such names for the moment in which its ranks join.
    wait_until(lambda: shared_memory() <= before, "no shared memory is left", 30)


@pytest.mark.parametrize("name", ["vllm-colocate", "vllm-server"])
def test_it_conforms(name, grpox, request):
    if name == "vllm-colocate":
        setting, passed = "kv_cache_gib=0.1", "10 passed"
    else:
        setting, passed = f"urls=[{request.getfixturevalue('servers')[0].url}]", "11 passed"
    done = grpox("plugins", "check", name, setting, vllm=name == "vllm-colocate")
    assert done.returncode == 0, done.stdout + done.stderr
    assert passed in done.stdout


def settings(server, name, ranks=1, staleness=1):
    return (
        f"generator={{name: vllm-server, urls: [{server.url}], start_timeout: {LONGEST_WAIT}}}",
        f"train.per_device_train_batch_size={256 // ranks}",
        f"train.max_staleness={staleness}",
        "evaluation=null",
        "tracking={}",
        f"output_dir=runs/{name}",
    )


def metrics_of(run):
    return [json.loads(line)["metrics"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def completions_of(run, step):
    return parquet.read_table(run / "completions" / f"step_{step:06d}.parquet")


@pytest.mark.parametrize("ranks", [1, 2])
def test_it_learns_from_samples_that_are_one_batch_old(servers, grpox, folder, ranks):
    name = f"ahead-{ranks}"
    done = grpox("train", "quickstart", *settings(servers[0], name, ranks), "train.max_steps=25", ranks=ranks)
    assert done.returncode == 0, done.stderr[-3000:]
    metrics = metrics_of(folder / "runs" / name)
    assert metrics[-1]["reward"] > metrics[0]["reward"] + 0.2
    assert [step["sampling/staleness"] for step in metrics] == [0, *[1] * 24]
    tables = [completions_of(folder / "runs" / name, step) for step in range(1, 26)]
    assert [set(table["policy_version"].to_pylist()) for table in tables] == [{0}, *({s} for s in range(24))]
    # The samples of the first step are the policy's own; those of later ones are corrected.
    assert metrics[0]["sampling/difference_max"] < 1e-4
    assert all(step["sampling/effective_sample_size"] > 0.5 for step in metrics)
    assert "warning" not in done.stderr


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_was_killed_goes_on_with_what_was_begun(servers, tmp_path, ranks):
    """Also on one rank in place of two: the samples after the checkpoint are those of before it."""
    overrides = *settings(servers[0], "killed", 2), "train.max_steps=8", "checkpoint.every=3"
    process = start(tmp_path, "quickstart", *overrides, ranks=2)
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


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_server_killed_during_a_run_with_two_ranks(servers, grpox, folder, staleness):
    """It samples the rest when it is back, by the weights of then: no completion is missing."""
    done, name = [], f"lost-{staleness}"
    overrides = *settings(servers[0], name, 2, staleness), "train.max_steps=6"
    run = threading.Thread(target=lambda: done.append(grpox("train", "quickstart", *overrides, ranks=2)))
    run.start()
    lines = folder / "runs" / name / "metrics.jsonl"
    while run.is_alive() and (not lines.exists() or len(lines.read_text().splitlines()) < 2):
        time.sleep(0.02)
    servers[0].kill()
    servers[0].start()
    run.join()
    servers[0].wait_until_ready()
    assert done[0].returncode == 0, done[0].stderr[-3000:]
    assert "lost a server" in done[0].stderr
    tables = [completions_of(folder / "runs" / name, step) for step in range(1, 7)]
    assert [table.num_rows for table in tables] == [256] * 6
    for step, table in enumerate(tables, start=1):
        assert set(table["policy_version"].to_pylist()) <= {max(0, step - 1 - staleness), step - 1}
    metrics = metrics_of(folder / "runs" / name)
    tokens = [0.0, *(step["num_tokens"] for step in metrics)]
    # Each step has 256 completions of one to five tokens and their prompts, once each.
    assert all(256 * 5 < after - before < 256 * 13 for before, after in pairwise(tokens))
    assert staleness or all(step["sampling/difference_max"] < 1e-4 for step in metrics)
