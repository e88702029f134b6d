"""Tokens of episodes are exact with vLLM too: in the trainer, over two ranks, and on a server."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.episode_runs import FILE, check_text_of_plain, kept_rollouts, largest_difference
from support.fixtures import GrpoxCommand
from support.vllm_serving import MODEL, NEEDS_VLLM, borrowed

from grpox_generators.configs import LONGEST_WAIT

pytestmark = NEEDS_VLLM


@pytest.fixture(scope="module", autouse=True)
def environment_file(folder: Path) -> None:
    (folder / "environment_file.py").write_text(FILE)


def check_run(grpox: GrpoxCommand, run: Path, *own: str, ranks: int = 1, steps: int = 1) -> None:
    done = grpox(
        "train",
        "quickstart",
        "tracking={keep: {path: 'environment_file.py:Keep'}}",
        "evaluation=null",
        "rewards=[{name: length, target: 8}]",
        "environment={path: 'environment_file.py:Again'}",
        "episodes={max_turn_tokens: 6, max_turns: 4}",
        "sampling.max_completion_length=30",
        f"train.max_steps={steps}",
        *own,
        f"output_dir={run}",
        ranks=ranks,
        vllm=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rollouts = kept_rollouts(run)
    assert len({len(rollout.turns) for rollout in rollouts}) > 1
    assert largest_difference(Path(MODEL), rollouts) < 1e-4
    check_text_of_plain(Path(MODEL), rollouts)


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_share_an_engine(grpox: GrpoxCommand, folder: Path, ranks: int) -> None:
    generator = f"generator={{name: vllm-colocate, tensor_parallel_size: {ranks}, kv_cache_gib: 0.1}}"
    size = f"train.per_device_train_batch_size={64 // ranks}"
    check_run(grpox, folder / f"colocate{ranks}", generator, size, ranks=ranks)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_server_samples_in_the_background(grpox: GrpoxCommand, folder: Path, ranks: int) -> None:
    run = folder / f"server{ranks}"
    with borrowed(1) as [server]:
        generator = f"generator={{name: vllm-server, urls: [{server.url}], start_timeout: {LONGEST_WAIT}}}"
        own = (generator, f"train.per_device_train_batch_size={64 // ranks}", "train.max_staleness=1")
        check_run(grpox, run, *own, steps=3, ranks=ranks)
    # Each batch after the first is sampled whole by the weights before the last update.
    for step, version in ((1, 0), (2, 0), (3, 1)):
        rollouts = kept_rollouts(run, step)
        assert {turn.policy_version for rollout in rollouts for turn in rollout.turns} == {version}
