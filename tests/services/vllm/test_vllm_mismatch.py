"""The real vLLM beside the trainer: where the two agree, and what a run does and tells where they do not."""

import json

import pytest
import torch
from support import processes
from support.vllm_serving import NEEDS_VLLM

pytestmark = NEEDS_VLLM

GENERATORS = '''
from dataclasses import replace
from math import nan

import torch

from grpox_generators.configs import VllmColocateConfig
from grpox_generators.vllm_colocate import VllmColocateGenerator


class Off(VllmColocateGenerator):
    Config = VllmColocateConfig
    provides = ("logprobs",)


class Perturbed(Off):
    """Its weights carry noise of 0.7 of their standard deviation."""

    def sync(self, weights, version):
        draw = torch.Generator().manual_seed(0)

        def noisy(weight):
            return weight + 0.7 * weight.std() * torch.randn(weight.shape, generator=draw)

        super().sync(((name, noisy(weight)) for name, weight in weights), version)


class Misreporting(Off):
    """Its first log-probability is missing, and the others are 2 too large."""

    def generate(self, *request):
        for rollout in super().generate(*request):
            _, *rest = rollout.sampler_logprobs
            yield replace(rollout, sampler_logprobs=(nan, *(logprob + 2 for logprob in rest)))
'''
SCRIPT = """
import sys

import grpox
from grpox.runtime.logs import show_logs

show_logs()
for name, generator, correction in {runs!r}:
    print("RUN", name, file=sys.stderr, flush=True)
    grpox.train("quickstart", [
        "generator={{" + generator + ", kv_cache_gib: 0.25}}", "correction=" + correction, "train.max_steps=4",
        "evaluation=null", "tracking={{}}", "output_dir=runs/" + name,
    ])
"""
RUNS = [
    ("same", "name: vllm-colocate", "token-truncate"),
    ("bfloat16", "name: vllm-colocate, dtype: bfloat16", "token-truncate"),
    ("perturbed-truncate", "path: off.py:Perturbed", "token-truncate"),
    ("perturbed-mask", "path: off.py:Perturbed", "token-mask"),
    ("perturbed-sequences", "path: off.py:Perturbed", "sequence-mask"),
    ("misreporting", "path: off.py:Misreporting", "token-truncate"),
]


@pytest.fixture(scope="module")
def told(folder):
    """Return the standard error of each of RUNS; one process trains them one after the other."""
    (folder / "off.py").write_text(GENERATORS)
    (folder / "script.py").write_text(SCRIPT.format(runs=RUNS))
    done = processes.run("script.py", cwd=folder, vllm=True)
    assert done.returncode == 0, done.stderr[-4000:]
    parts = [part.partition("\n") for part in done.stderr.split("RUN ")[1:]]
    return {name: text for name, _, text in parts}


@pytest.fixture(scope="module")
def metrics(told, folder):
    """name of the run -> name of the metric -> its values in the 4 steps."""
    found = {}
    for name in told:
        lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
        steps = [json.loads(line)["metrics"] for line in lines]
        found[name] = {metric: [step[metric] for step in steps] for metric in steps[0]}
    return found


def test_the_gradient_stays_finite_however_far_the_generator_is_off(metrics):
    assert sorted(metrics) == sorted(name for name, *_ in RUNS)
    for name, of_run in metrics.items():
        norms = torch.tensor(of_run["grad_norm"])
        assert bool(norms.isfinite().all()), name
        assert len(norms) == 4
        assert norms.max() > 0, name


def test_the_difference_tells_how_far_the_generator_is_off(metrics):
    largest = {name: of_run["sampling/difference_max"] for name, of_run in metrics.items()}
    assert max(largest["same"]) < 1e-4
    assert min(largest["bfloat16"]) > 1e-3
    for name in ("perturbed-truncate", "perturbed-mask", "perturbed-sequences"):
        assert min(largest[name]) > 1


def test_corrections_do_what_they_are_for(metrics):
    for name in ("same", "bfloat16"):
        assert metrics[name]["sampling/truncated"] == metrics[name]["sampling/masked"] == [0.0] * 4
    assert min(metrics["perturbed-truncate"]["sampling/truncated"]) > 0
    assert min(metrics["perturbed-mask"]["sampling/masked"]) > 0.1
    # A completion of a perturbed engine is far likelier to it than to the policy: few weigh more than 3.
    assert max(metrics["perturbed-sequences"]["sampling/masked"]) > 0
    assert max(metrics["perturbed-sequences"]["sampling/raw_ratio_max"]) > 3


def test_only_what_is_unhealthy_is_told_and_once(told, metrics):
    for name, text in told.items():
        alarms = [line.partition(": mismatch/")[2] for line in text.splitlines() if ": mismatch/" in line]
        seen = [alarm.split()[0] for alarm in alarms]
        if name == "misreporting":
            assert sorted(seen) == ["missing_logprobs", "ratio_mean"]
        elif name.startswith("perturbed"):
            assert seen.count("effective_sample_size") == 1
            shares = metrics[name]["sampling/effective_sample_size"]
            step = 1 + next(place for place, share in enumerate(shares) if share < 0.3)
            assert f"effective_sample_size is {shares[step - 1]:.3g} at step {step};" in text
        else:
            assert seen == []
