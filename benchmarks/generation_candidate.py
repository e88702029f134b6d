"""One candidate of generation.py in a process of its own, which samples whenever it is told to.

Usage: generation_candidate.py FILE_DESCRIPTOR ARGUMENTS.json, the former of a pipe of multiprocessing
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
from started import start
from transformers import PreTrainedTokenizerBase

from grpox.contracts import Prompt
from grpox.policy.precision import dtype_here
from grpox.runfile.load import ResolvedRun, load_run
from grpox.training.inputs import open_prompts, open_tokenizer
from grpox_generators.vllm_requests import request_params, seed_of

Figures = dict[str, float]
"""seconds, cpu_seconds of all processes that took part, and tokens sampled."""
Sample = Callable[[int], Figures]
"""A seed -> what sampling with it took."""


def prompts_of(run: ResolvedRun, tokenizer: PreTrainedTokenizerBase, count: int, samples: int) -> list[Prompt]:
    """The first prompts of the run's data, from the start again where it has too few."""
    data, _ = open_prompts(run, tokenizer)
    return [Prompt(group, data.token_ids(group % len(data)), samples) for group in range(count)]


def timed(generate: Callable[[], int], pids: Sequence[int]) -> Figures:
    """Measure `generate`, which returns its number of tokens; children of the processes `pids` count too."""
    roots = [psutil.Process(pid) for pid in pids]
    family = [process for root in roots for process in (root, *root.children(recursive=True))]

    def cpu_seconds() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in family)

    cpu, begin = cpu_seconds(), time.perf_counter()
    tokens = generate()
    return {"seconds": time.perf_counter() - begin, "cpu_seconds": cpu_seconds() - cpu, "tokens": tokens}


@contextmanager
def generator(given: dict[str, Any]) -> Iterator[Sample]:
    """A generator of grpox; it is given the weights, which empties vLLM's prefix cache, before it is timed."""
    started = start(given["run"], given["overrides"])
    prompts = prompts_of(started.run, started.tokenizer, given["prompts"], given["samples"])

    def generate(seed: int) -> int:
        rollouts = list(started.generator.generate(prompts, started.run.config.sampling, seed))
        return sum(len(rollout.completion_ids) for rollout in rollouts)

    def sample(seed: int) -> Figures:
        started.generator.sync(started.engine.weights(), 0)
        return timed(lambda: generate(seed), [os.getpid(), *given["servers"]])

    with closing(started.generator):
        yield sample


@contextmanager
def bare(given: dict[str, Any]) -> Iterator[Sample]:
    """vLLM by itself; with `plain` its requests are the shortest that sample alike."""
    from vllm import LLM, SamplingParams

    run = load_run(given["run"], given["overrides"])
    tokenizer = open_tokenizer(run)
    sampling, prompts = run.config.sampling, prompts_of(run, tokenizer, given["prompts"], given["samples"])
    requests = [{"prompt_token_ids": list(prompt.token_ids)} for prompt in prompts]
    model = run.config.model
    engine = LLM(model.path, dtype=dtype_here(model), enforce_eager=True, **given["engine"])

    def params(prompt: Prompt, seed: int) -> SamplingParams:
        n, length = prompt.num_samples, sampling.max_completion_length
        if given["plain"]:
            return SamplingParams(n=n, max_tokens=length, temperature=sampling.temperature)
        ends, seeded = [tokenizer.eos_token_id], [(prompt, seed_of(prompt, seed))]
        return SamplingParams(**request_params(seeded, sampling, ends, len(tokenizer), None, "vLLM")[0])

    def generate(seed: int) -> int:
        outputs = engine.generate(requests, [params(p, seed) for p in prompts], use_tqdm=False)
        return sum(len(completion.token_ids) for output in outputs for completion in output.outputs)

    def sample(seed: int) -> Figures:
        engine.reset_prefix_cache()
        return timed(lambda: generate(seed), [os.getpid()])

    yield sample


def main(descriptor: str, arguments: str) -> None:
    given = json.loads(Path(arguments).read_text())
    opened = bare if given["bare"] else generator
    # Inherited by vLLM's processes, it would outlive this one, and the parent would wait for ever.
    os.set_inheritable(int(descriptor), False)
    with Connection(int(descriptor)) as parent, opened(given) as sample:
        sample(0)  # what is slow the first time alone
        parent.send(None)
        while (seed := parent.recv()) is not None:
            parent.send(sample(seed))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
