"""`grpox train --watch`: a page as long as the run trains, from rank 0 alone."""

from __future__ import annotations

import urllib.error
import urllib.request
from pathlib import Path

import pytest
from support.processes import run

SMALL = ("train.max_steps=2", "train.per_device_train_batch_size=16", "train.warmup_steps=0")
SMALL += ("evaluation=null", "tracking={}", "checkpoint.every=0", "output_dir=run")


def test_rank_0_prints_one_address_whose_server_ends_with_the_run(tmp_path: Path) -> None:
    done = run("-m", "grpox", "train", "quickstart", *SMALL, "--watch", cwd=tmp_path, ranks=2)
    assert done.returncode == 0, done.stderr
    [address] = [line for line in done.stdout.splitlines() if line.startswith("http://127.0.0.1:")]
    assert done.stdout.startswith(address)
    assert "?token=" in address
    assert "step 2/2" in done.stdout
    with pytest.raises(urllib.error.URLError) as refused:
        urllib.request.urlopen(address)
    assert isinstance(refused.value.reason, ConnectionRefusedError)
