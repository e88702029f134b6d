"""Runs with vLLM in the training process: they learn on one rank and on two, and leave no shared memory."""

from importlib import util
from pathlib import Path

import pytest
from support.generator_line import assert_learned, run_file
from support.services import wait_until

pytestmark = [
    pytest.mark.skipif(util.find_spec("vllm") is None, reason="vLLM is not installed (make vllm)"),
]


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


@pytest.mark.parametrize("share", [1, 2])
def test_a_run_on_two_ranks_learns_with_nothing_but_the_generator_changed(grpox, folder, share, killed_run):
    before = shared_memory()
    output = folder / "runs" / f"vllm-{share}"
    done = grpox(
        "train",
        "quickstart",
        "generator=vllm-colocate",
        f"generator.tensor_parallel_size={share}",
        "train.max_steps=25",
        "train.per_device_train_batch_size=128",
        "evaluation=null",
        "tracking={}",
        f"output_dir={output}",
        ranks=2,
        vllm=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert_learned(output, "token-truncate")
    # A run beside this has such names for the moment in which its ranks join.
    wait_until(lambda: shared_memory() <= before, "no shared memory is left", 30)


def test_a_run_learns_with_nothing_but_the_line_of_the_generator_changed(grpox, folder, killed_run):
    before = shared_memory()
    (folder / "run.yaml").write_text(run_file("vllm-colocate", "runs/line"), encoding="utf-8")
    done = grpox("train", "run.yaml", vllm=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert_learned(folder / "runs" / "line", "token-truncate")
    wait_until(lambda: shared_memory() <= before, "no shared memory is left", 30)


def test_it_conforms(grpox):
    done = grpox("plugins", "check", "vllm-colocate", "kv_cache_gib=0.1", vllm=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "10 passed" in done.stdout
