"""Continuous batching of transformers: a new completion replaces each one that ends.

This pays when completions differ much in length. It needs flash attention to be fast: with sdpa each token
attends to the keys of the whole batch, under a mask.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from grpox.contracts import Prompt, Rollout
from grpox.errors import RunFailed
from grpox.toolkit import TEXT, shorten, text_of

# The library warns at each call of processors that it has not classified, such as min_p's. Errors are raised
# here.
logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)

PAGE_SIZE = 32
"""Positions per page of the cache on a CPU. On CUDA the library chooses the size that suits its kernels."""


def complete(
    model: Any,
    prompts: Sequence[Prompt],
    limits: Sequence[int],
    config: GenerationConfig,
    batch_size: int,
    seed: int,
    version: int,
) -> Iterator[Rollout]:
    """Complete every prompt.

    Args:
        model: in evaluation mode, not sharded.
        limits: largest number of tokens of each prompt's completions.
        config: the distribution and `eos_token_id`.
        batch_size: completions in progress at a time.
        seed: seeds the global random state, which the caller restores.
        version: of the weights.

    Raises:
        RunFailed: a request failed, for example because memory ran out.
    """

    def alike(pair: tuple[Prompt, int]) -> tuple[int, int]:
        return pair[0].num_samples, pair[1]

    for (num_samples, length), equal in groupby(sorted(zip(prompts, limits, strict=True), key=alike), alike):
        group = [prompt for prompt, _ in equal]
        config.num_return_sequences, config.max_new_tokens = num_samples, length
        wanted = len(group) * num_samples
        in_progress, sizes = min(batch_size, wanted), dict[str, int]()
        if model.device.type == "cpu":
            # By default the library takes nine tenths of the machine's memory.
            pages = -(-(max(len(prompt.token_ids) for prompt in group) + length) // PAGE_SIZE) + 1
            sizes = {"page_size": PAGE_SIZE, "num_blocks": in_progress * pages}
            sizes["max_batch_tokens"] = max(in_progress, 256)
        settings = ContinuousBatchingConfig(
            return_logprobs=True,
            seed=seed,
            max_requests_per_batch=in_progress,
            auto_switch_to_flash=model.dtype != torch.float32,
            **sizes,
        )
        manager = model.init_continuous_batching(generation_config=config, continuous_batching_config=settings)
        try:
            # Add requests before the start: otherwise a thread's timing decides the first batch, and so each
            # draw.
            names = manager.add_requests([list(prompt.token_ids) for prompt in group], length)
            prompt_of, samples = dict(zip(names, group, strict=True)), dict.fromkeys(names, 0)
            manager.start()
            while wanted:
                result = manager.get_result(timeout=1)
                if result is None:
                    if not manager.is_running():
                        reason = text_of(manager.background_thread_status.fatal_error)
                        raise RunFailed(f"continuous batching ended early: {reason}")
                elif result.error is not None:
                    raise RunFailed(f"continuous batching failed: {shorten(str(result.error), TEXT)}")
                elif result.is_finished():
                    wanted -= 1
                    name, token_ids = result.request_id.partition("__child")[0], tuple(result.generated_tokens)
                    prompt, reason = (
                        prompt_of[name],
                        "stop" if token_ids[-1] in config.eos_token_id else "length",
                    )
                    of = prompt.group_id, samples[name], prompt.token_ids, token_ids
                    yield Rollout(*of, reason, version, tuple(result.logprobs))
                    samples[name] += 1
        finally:
            manager.stop(block=True, hard_stop=True)
            manager.destroy()
