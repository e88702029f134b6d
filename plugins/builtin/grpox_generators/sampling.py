"""The sampling distribution as logits processors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from grpox.config import SamplingConfig
from grpox.errors import ConfigError, Problem, text_of
from grpox_generators.generation_kwargs import LOGITS, OF_ROWS, RUNTIME, WARPERS


def distribution_config(sampling: SamplingConfig, end_ids: Sequence[int]) -> GenerationConfig:
    """What transformers calls the distribution: every setting that makes a logits processor.

    Args:
        end_ids: tokens that end a completion; suppressed before `min_completion_length`.
    """
    settings: dict[str, Any] = {
        "repetition_penalty": sampling.repetition_penalty,
        "min_new_tokens": sampling.min_completion_length or None,
        "eos_token_id": list(end_ids),
        "do_sample": sampling.temperature > 0,
    }
    wanted: tuple[str, ...] = LOGITS + RUNTIME
    if sampling.temperature > 0:
        names = ("temperature", "top_k", "top_p")
        settings |= {name: getattr(sampling, name) for name in names} | {"min_p": sampling.min_p or None}
        wanted += WARPERS
    kwargs = {name: value for name, value in sampling.generation_kwargs.items() if name in wanted}
    try:
        return GenerationConfig(**settings, **kwargs)
    except (TypeError, ValueError) as error:
        raise refused_kwargs(sampling, error) from error


def refused_kwargs(sampling: SamplingConfig, error: Exception) -> ConfigError:
    """transformers' complaint about `sampling.generation_kwargs`."""
    what = f"transformers refuses it: {text_of(error)}"
    return ConfigError(Problem(what, "sampling.generation_kwargs", given=str(sampling.generation_kwargs)))


class Distribution(LogitsProcessor):  # type: ignore[misc]
    """All processors of a sampling config, made and ordered by transformers itself.

    Some of them look at the tokens so far, padding included: in padded rows a repetition penalty would fall on
    the padding token, which often is EOS. So rows of unequal prompts are processed apart, each without its
    padding, wherever such a processor is in use.

    Args:
        model: whose processors they are.
        sampling: the settings.
        end_ids: as for `distribution_config`.
        prompts: i64[N, P], padded on the left.
        lengths: i64[N], of the prompts without padding.
    """

    def __init__(
        self, model: Any, sampling: SamplingConfig, end_ids: Sequence[int], prompts: Tensor, lengths: Tensor
    ) -> None:
        columns = prompts.shape[1]
        self._lengths = lengths if looks_back(sampling) else torch.full_like(lengths, columns)
        self._parts: dict[int, tuple[int, LogitsProcessorList]] = {}
        for length in set(self._lengths.tolist()):
            start = columns - length
            made = _processors(model, sampling, end_ids, prompts[self._lengths == length, start:])
            self._parts[length] = (start, made)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        for length, (start, processors) in self._parts.items():
            if len(self._parts) == 1:
                changed: Tensor = processors(input_ids[:, start:], scores)
                return changed
            rows = self._lengths == length
            scores[rows] = processors(input_ids[rows, start:], scores[rows])
        return scores

    def keep(self, kept: Tensor) -> None:
        """Go on with the rows bool[B] of those of the last call; not for what `keeps_rows` names."""
        self._lengths = self._lengths[kept]
        left = set(self._lengths.tolist())
        self._parts = {length: part for length, part in self._parts.items() if length in left}


def looks_back(sampling: SamplingConfig) -> bool:
    """Whether a processor may look at the tokens so far."""
    return sampling.repetition_penalty != 1 or any(name in LOGITS for name in sampling.generation_kwargs)


def keeps_rows(sampling: SamplingConfig) -> bool:
    """Whether a processor remembers something of each row, and so must see all of them in every call."""
    return any(name in OF_ROWS for name in sampling.generation_kwargs)


def _processors(
    model: Any, sampling: SamplingConfig, end_ids: Sequence[int], prompts: Tensor
) -> LogitsProcessorList:
    """transformers' processors for prompts i64[N, P] without padding."""
    config = distribution_config(sampling, end_ids)
    config.max_length = prompts.shape[1] + sampling.max_completion_length
    config._eos_token_tensor = torch.tensor(list(end_ids), device=prompts.device) if end_ids else None
    try:
        # Its own, because generate() applies temperature and what follows after any processor it is given: the
        # draw has to come last.
        return model._get_logits_processor(
            config, input_ids_seq_length=prompts.shape[1], encoder_input_ids=prompts, device=prompts.device
        )
    except (TypeError, ValueError) as error:
        raise refused_kwargs(sampling, error) from error


def runtime_kwargs(sampling: SamplingConfig) -> Mapping[str, Any]:
    """The `generation_kwargs` that are no part of the distribution."""
    names = ("cache_config", "max_cache_len", "disable_compile")
    return {name: sampling.generation_kwargs[name] for name in names if name in sampling.generation_kwargs}
