"""The sampling distribution as logits processors, and a recorder of the sampled tokens' log-probabilities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from grpox.config import SamplingConfig
from grpox.errors import ConfigError, Problem
from grpox_generators.generation_kwargs import LOGITS, RUNTIME, WARPERS


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
    what = f"transformers refuses it: {error}"
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
        distinct = sorted(set(lengths.tolist()))
        if len(distinct) == 1 or not looks_back(sampling):
            parts = [(slice(None), distinct[0] if len(distinct) == 1 else columns)]
        else:
            parts = [((lengths == length).nonzero().squeeze(1), length) for length in distinct]
        self._parts: list[tuple[Any, int, LogitsProcessorList]] = []
        for rows, length in parts:
            start = columns - length
            made = _processors(model, sampling, end_ids, prompts[rows, start:])
            self._parts.append((rows, start, made))

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        for rows, start, processors in self._parts:
            scores[rows] = processors(input_ids[rows, start:], scores[rows])
        return scores


def looks_back(sampling: SamplingConfig) -> bool:
    """Whether a processor may look at the tokens so far."""
    return sampling.repetition_penalty != 1 or any(name in LOGITS for name in sampling.generation_kwargs)


def _processors(
    model: Any, sampling: SamplingConfig, end_ids: Sequence[int], prompts: Tensor
) -> LogitsProcessorList:
    """transformers' processors for prompts i64[N, P] without padding."""
    config = distribution_config(sampling, end_ids)
    config.max_length = prompts.shape[1] + sampling.max_completion_length
    config._eos_token_tensor = torch.tensor(list(end_ids), device=prompts.device) if end_ids else None
    try:
        # Its own, because generate() applies temperature and what follows after any processor it is given: the
        # recorder has to come last.
        return model._get_logits_processor(
            config, input_ids_seq_length=prompts.shape[1], encoder_input_ids=prompts, device=prompts.device
        )
    except (TypeError, ValueError) as error:
        raise refused_kwargs(sampling, error) from error


def runtime_kwargs(sampling: SamplingConfig) -> Mapping[str, Any]:
    """The `generation_kwargs` that are no part of the distribution."""
    names = ("cache_config", "max_cache_len", "disable_compile")
    return {name: sampling.generation_kwargs[name] for name in names if name in sampling.generation_kwargs}


class SampledLogprobs(LogitsProcessor):  # type: ignore[misc]
    """Records log-probabilities of sampled tokens; must be the last processor.

    A processor sees the logits before the token is drawn. So each call keeps them, and reads from those of
    the call before the token that was drawn since: one [B, V] tensor is alive, not one per position.

    Args:
        prompt_length: columns of the prompt in the sequences that generate returns.
    """

    def __init__(self, prompt_length: int) -> None:
        self.prompt_length = prompt_length
        self._logprobs: list[Tensor] = []
        self._last: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._read(input_ids)
        self._last = scores
        return scores

    def finish(self, sequences: Tensor) -> Tensor:
        """Log-probabilities f32[B, T] of the completions in sequences i64[B, prompt_length + T]."""
        self._read(sequences[:, : self.prompt_length + len(self._logprobs) + 1])
        return torch.stack(self._logprobs, dim=1)

    def _read(self, input_ids: Tensor) -> None:
        if self._last is None:
            return
        chosen = self._last.gather(-1, input_ids[:, -1:]).squeeze(-1)
        self._logprobs.append(chosen - torch.logsumexp(self._last, dim=-1))
        self._last = None
