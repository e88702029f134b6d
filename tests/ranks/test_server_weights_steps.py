"""Weights to servers by a group of their own, in step with gathers; and a server that dies in the middle."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest
from rank_scripts import run_script
from support.ports import free_port


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    import torch

    folder = tmp_path_factory.mktemp("servers")
    run_script("server_weights_steps.py", folder, free_port(), free_port(), folder=folder, ranks=2)
    return {path.stem: torch.load(path) for path in folder.glob("*.pt")}


def test_every_server_has_the_weights_bit_by_bit(results: dict[str, Any]) -> None:
    sent = results["rank-0"]["weights"]
    for server in ("server-0", "server-1"):
        assert set(results[server]) == set(sent)
        for name, weight in sent.items():
            assert results[server][name].equal(weight), name


def test_nothing_is_gathered_while_a_bucket_is_sent(results: dict[str, Any]) -> None:
    """Weights of 2.1 MB in buckets of 1 MiB: one bucket is sent before the next is gathered."""
    events = [event.split() for event in results["rank-0"]["events"]]
    runs = [(kind, [name for _, name in part]) for kind, part in groupby(events, key=lambda event: event[0])]
    assert len(runs) >= 4
    gathered: list[str] = []
    for kind, names in runs:
        if kind == "gather":
            gathered += names
        else:  # all but one that did not fit any more, or all at last
            assert names == gathered[: len(names)]
            del gathered[: len(names)]
            assert len(gathered) <= 1
    assert gathered == []
    assert not any(event.startswith("send") for event in results["rank-1"]["events"])


def test_no_rank_runs_ahead_of_the_one_that_sends(results: dict[str, Any]) -> None:
    # Rank 1 is through only when rank 0 has used all buckets but the last.
    [through] = results["rank-1"]["clocks"]
    assert through > results["rank-0"]["clocks"][-2]


def test_a_server_that_dies_in_a_transfer_ends_the_run_on_every_rank_by_name(results: dict[str, Any]) -> None:
    url = results["rank-0"]["urls"][1]
    for rank in ("rank-0", "rank-1"):
        failure = results[rank]["failure"]
        assert f"a vLLM server was lost while it received weights by nccl: {url}" in failure
