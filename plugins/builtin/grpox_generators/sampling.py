"""Parts of sampling by token: the distribution, the draw of each token, and texts that end a completion.

Logits processors form the distribution. A token is drawn by the inverse of the cumulative probabilities, with
one uniform number per row: torch.multinomial draws a random number for each token of the vocabulary, which on
a CPU takes longer than the model's attention. A prompt can have its own seed.

A completion ends with the first token that completes a stop text. The search uses the decoded text, not the
tokens' spellings, because a character may span several tokens.

All generators share the ends of completions, the limits of positions and the seeds of prompts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedTokenizerBase

from grpox.config import SamplingConfig
from grpox.contracts import Prompt
from grpox.errors import ConfigError, RunFailed
from grpox.toolkit import text_of, upload
from grpox_generators.generation_kwargs import LOGITS, OF_ROWS, RUNTIME, WARPERS


def distribution_config(sampling: SamplingConfig, end_ids: Sequence[int]) -> GenerationConfig:
    """Build the transformers settings that become logits processors.

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
    """Return the error for `sampling.generation_kwargs` that transformers refuses."""
    what = f"transformers refuses this value: {text_of(error)}"
    return ConfigError(what, "sampling.generation_kwargs", given=str(sampling.generation_kwargs))


class Distribution:
    """All processors of a sampling config, created and ordered by transformers.

    Some of them look at earlier tokens, including padding: in padded rows a repetition penalty would also
    penalize the padding token, which often is EOS. If such a processor is in use, prompts of different lengths
    are therefore processed separately, each without its padding.

    Args:
        model: model that provides the processors.
        sampling: the settings.
        end_ids: as for `distribution_config`.
        prompts: i64[N, P], padded on the left.
        lengths: i64[N], tokens of each prompt without padding.
        limits: i64[N], longest allowed completion of each row; default: the limit of `sampling`.
    """

    def __init__(
        self,
        model: Any,
        sampling: SamplingConfig,
        end_ids: Sequence[int],
        prompts: Tensor,
        lengths: Tensor,
        limits: Tensor | None = None,
    ) -> None:
        if limits is None:
            limits = torch.full_like(lengths, sampling.max_completion_length)
        columns, span = prompts.shape[1], int(limits.max()) + 1
        looks_back = sampling.repetition_penalty != 1 or any(
            name in LOGITS for name in sampling.generation_kwargs
        )
        kinds = lengths * span + limits
        self._kinds = kinds if looks_back else torch.full_like(lengths, columns * span + span - 1)
        """i64[B]: rows with the same number are processed together."""
        self._parts: dict[int, tuple[int, LogitsProcessorList]] = {}
        for kind in set(self._kinds.tolist()):
            length, limit = divmod(kind, span)
            config = distribution_config(sampling, end_ids)
            config.max_length = length + limit
            config._eos_token_tensor = torch.tensor(list(end_ids), device=prompts.device) if end_ids else None
            alike = prompts[self._kinds == kind, columns - length :]
            try:
                processors = model._get_logits_processor(
                    config, input_ids_seq_length=length, encoder_input_ids=alike, device=prompts.device
                )
            except (TypeError, ValueError) as error:
                raise refused_kwargs(sampling, error) from error
            self._parts[kind] = columns - length, processors

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        for kind, (start, processors) in self._parts.items():
            if len(self._parts) == 1:
                changed: Tensor = processors(input_ids[:, start:], scores)
                return changed
            rows = self._kinds == kind
            scores[rows] = processors(input_ids[rows, start:], scores[rows])
        return scores

    def keep(self, remaining: Tensor) -> None:
        """Keep the rows of the last call that bool[B] selects; not allowed if `keeps_rows` is true."""
        self._kinds = self._kinds[remaining]
        left = set(self._kinds.tolist())
        self._parts = {kind: part for kind, part in self._parts.items() if kind in left}


def keeps_rows(sampling: SamplingConfig) -> bool:
    """Tell whether a processor keeps state for each row, and so must see all rows in every call."""
    return any(name in OF_ROWS for name in sampling.generation_kwargs)


BLOCK = 256
"""Tokens whose probabilities are summed in float32, which is as exact as a float32 softmax itself. Sums of
blocks are float64."""
AT_A_TIME = 64
"""Number of tokens for which a prompt's random numbers are drawn at once. Another value gives other numbers."""


class NoProbabilities(Exception):
    """The scores of a row are no distribution: they are not finite, or every token is forbidden."""


class Draw:
    """Draws each next token. A row's random numbers do not depend on the set of rows that still run.

    Args:
        rows: N, completions of the batch.
        length: T, largest number of tokens of a completion.
        greedy: take the most likely token instead.
        device: device of the scores.
        uniform: N uniform numbers, f64[N, 1], for each token; default: torch's global state.
    """

    def __init__(
        self,
        rows: int,
        length: int,
        greedy: bool,
        device: torch.device,
        uniform: Iterator[Tensor] | None = None,
    ) -> None:
        self.greedy = greedy
        self._uniform = uniform
        self.logprobs = torch.zeros(rows, length, device=device)
        """f32[N, T]: log-probabilities of the tokens drawn, 0 after the end of a completion."""
        self._running = torch.arange(rows, device=device)
        self._is_sound = torch.ones((), dtype=torch.bool, device=device)
        self._drawn = 0

    def take(self, scores: Tensor) -> Tensor:
        """Draw a token for each row that still runs.

        Args:
            scores: f32[B, V].

        Returns:
            i64[B].
        """
        probabilities = scores.softmax(dim=-1)
        blocks = block_sums(probabilities).cumsum(dim=-1)
        total = blocks[:, -1:]
        self._is_sound &= total.isfinite().all()
        tokens = scores.argmax(dim=-1, keepdim=True) if self.greedy else self._inverse(probabilities, blocks)
        # Where one token of many is likely, the float32 softmax's own sum is off by 1e-5.
        drawn = probabilities.gather(-1, tokens) / total
        self.logprobs[self._running, self._drawn] = drawn.log().squeeze(-1).float()
        self._drawn += 1
        return tokens.squeeze(-1)

    def look(self, ended: Tensor) -> float:
        """Return the share of rows that have `ended`, bool[B]; waits once for the device.

        Raises:
            NoProbabilities: some scores so far were no distribution.
        """
        is_sound, share = torch.stack((self._is_sound.float(), ended.float().mean())).tolist()
        if not is_sound:
            raise NoProbabilities
        return float(share)

    def keep(self, remaining: Tensor) -> None:
        """Keep the rows of the last call that bool[B] selects."""
        self._running = self._running[remaining]

    def _inverse(self, probabilities: Tensor, blocks: Tensor) -> Tensor:
        """Draw by the inverse of the cumulated probabilities, first a block, then a token of it.

        A uniform number is at most 1 - 2^-53, so the number looked for is less than the last sum, and the first
        sum above it is that of a block, or a token, of positive probability. For a row that is no distribution
        any token is returned; `look` then fails.

        Args:
            probabilities: f32[B, V].
            blocks: f64[B, C], cumulated sums of blocks.

        Returns:
            i64[B, 1].
        """
        if self._uniform is None:
            uniform = torch.rand(len(self.logprobs), 1, dtype=torch.float64, device=blocks.device)
        else:
            uniform = next(self._uniform)
        wanted = uniform[self._running] * blocks[:, -1:]
        if blocks.shape[1] == 1:
            sums = probabilities.cumsum(dim=-1, dtype=torch.float64)
            return torch.searchsorted(sums, wanted, right=True).clamp(max=probabilities.shape[1] - 1)
        block = torch.searchsorted(blocks, wanted, right=True).clamp(max=blocks.shape[1] - 1)
        before = torch.where(block > 0, blocks.gather(1, (block - 1).clamp(min=0)), 0.0)
        places = block * BLOCK + torch.arange(BLOCK, device=blocks.device)
        inside = probabilities.gather(1, places.clamp(max=probabilities.shape[1] - 1))
        sums = inside.masked_fill(places >= probabilities.shape[1], 0).cumsum(dim=-1, dtype=torch.float64)
        # A block's own sum is float32: scaled to it, the number stays below the last of `sums`.
        size = blocks.gather(1, block) - before
        wanted = ((wanted - before) / size * sums[:, -1:]).minimum(sums[:, -1:] * (1 - 2**-52))
        return (block * BLOCK + torch.searchsorted(sums, wanted, right=True)).clamp(
            max=probabilities.shape[1] - 1
        )


def block_sums(probabilities: Tensor) -> Tensor:
    """Sum probabilities f32[B, V] in blocks of `BLOCK` and a rest; if they are few, at once: f64[B, C]."""
    whole = probabilities.shape[1] // BLOCK * BLOCK
    if whole <= BLOCK:
        return probabilities.cumsum(dim=-1, dtype=torch.float64)[:, -1:]
    sums = [probabilities[:, :whole].view(len(probabilities), -1, BLOCK).sum(dim=-1)]
    if whole < probabilities.shape[1]:
        sums.append(probabilities[:, whole:].sum(dim=-1, keepdim=True))
    return torch.cat(sums, dim=1).double()


def own_uniform(prompts: Sequence[Prompt], device: torch.device) -> Iterator[Tensor] | None:
    """Return the uniform numbers f64[N, 1] of each next token, one row per completion; None unless every prompt
    has a seed.

    Each prompt has a random generator on the CPU, so that every device samples the same.
    """
    seeds = [prompt.seed for prompt in prompts if prompt.seed is not None]
    if not prompts or len(seeds) < len(prompts):
        return None
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def numbers() -> Iterator[Tensor]:
        while True:
            drawn = [
                torch.rand(prompt.num_samples, AT_A_TIME, generator=generator, dtype=torch.float64)
                for generator, prompt in zip(generators, prompts, strict=True)
            ]
            [of_tokens] = upload([torch.cat(drawn).numpy()], device)
            yield from torch.split(of_tokens, 1, dim=1)

    return numbers()


class StopTexts:
    """Ends rows whose completion completes a stop text, and records the position.

    Args:
        texts: stop texts, none of them empty.
        tokenizer: decodes the tokens; special tokens are part of the text.
        rows: N, completions in the batch.
        min_length: a text completed within this number of tokens does not count, as EOS is suppressed there
            too.
    """

    def __init__(
        self,
        texts: Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        rows: int,
        min_length: int,
    ) -> None:
        self.texts = texts
        self.tokenizer = tokenizer
        self.min_length = min_length
        self.ends: list[int | None] = [None] * rows
        """Number of tokens of each completion up to and including the one that completed a text; None: no text
        yet."""
        self._running = list(range(rows))
        # A token has at least one byte. Four more tokens make the first character of the text whole.
        self._window = max((len(text.encode()) for text in texts), default=0) + 4
        self._may_complete: dict[int, bool] = {}

    def look(self, token_ids: Tensor, new: int) -> Tensor:
        """Look at the last `new` tokens of each row that still runs.

        Args:
            token_ids: i64[B, T], completions so far; a text that begins in the prompt does not count.

        Returns:
            bool[B], rows that a text has ended, on the device of `token_ids`.
        """
        if not self.texts and self.ends.count(None) == len(self.ends):
            return torch.zeros(len(token_ids), dtype=torch.bool, device=token_ids.device)
        total = token_ids.shape[1]
        start = max(0, total - new + 1 - self._window)
        for row, tail in zip(self._running, token_ids[:, start:].tolist(), strict=True) if self.texts else ():
            for length in range(max(total - new, self.min_length) + 1, total + 1):
                seen = tail[max(0, length - self._window - start) : length - start]
                if self.ends[row] is None and self._candidate(seen[-1]) and self.completes(seen):
                    self.ends[row] = length
        return torch.tensor([self.ends[row] is not None for row in self._running], device=token_ids.device)

    def keep(self, remaining: Tensor) -> None:
        """Keep the rows of the last call that bool[B] selects."""
        self._running = [row for row, stays in zip(self._running, remaining.tolist(), strict=True) if stays]

    def completes(self, token_ids: list[int]) -> bool:
        """Tell whether the last of `token_ids` completes a stop text."""
        before, text = self._decode(token_ids[:-1]), self._decode(token_ids)
        # The last token may also change earlier text: the parts of a character become one character.
        pairs = enumerate(zip(before, text, strict=False))
        known = next((place for place, (old, new) in pairs if old != new), len(before))
        return any(text.rfind(stop) + len(stop) > known for stop in self.texts if stop in text)

    def _candidate(self, token_id: int) -> bool:
        """Tell whether a text could end in this token. For most tokens the answer is no, and nothing else is
        decoded."""
        if token_id not in self._may_complete:
            alone = self._decode([token_id])
            # White space and parts of characters look different when decoded alone.
            unclear = not alone.strip() or "\ufffd" in alone
            self._may_complete[token_id] = unclear or any(
                text[-1] in alone or text[-1].isspace() for text in self.texts
            )
        return self._may_complete[token_id]

    def _decode(self, token_ids: list[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=False))


def end_ids(sampling: SamplingConfig, stop_token_ids: Sequence[int], vocabulary: int) -> tuple[int, ...]:
    """Return the tokens that end a completion: those of model and tokenizer, and those of the run file.

    Raises:
        ConfigError: a token of the run file is not in the vocabulary.
    """
    outside = [token for token in sampling.stop_token_ids if not 0 <= token < vocabulary]
    if outside:
        what = "is not in the model's vocabulary"
        given, allowed = ", ".join(map(str, outside)), f"0 to {vocabulary - 1}"
        raise ConfigError(what, "sampling.stop_token_ids", given=given, allowed=allowed)
    return tuple(dict.fromkeys((*stop_token_ids, *sampling.stop_token_ids)))


def check_length(prompts: Sequence[Prompt], sampling: SamplingConfig, limit: int | None, whose: str) -> None:
    """Refuse a prompt and completion that need more than `limit` positions; None means no limit.

    Args:
        whose: owner of the limit, for the message.

    Raises:
        RunFailed: a prompt and its longest allowed completion do not fit together.
    """
    sizes = [(len(prompt.token_ids), longest_completion(prompt, sampling), prompt) for prompt in prompts]
    if limit is None or not sizes:
        return
    tokens, longest, prompt = max(sizes, key=lambda size: size[0] + size[1])
    if tokens + longest > limit:
        key = "sampling.max_completion_length" if prompt.max_tokens is None else "its max_tokens"
        raise RunFailed(
            f"a prompt of {tokens} tokens plus {key} {longest} exceed the {limit} positions of {whose}"
        )


def longest_completion(prompt: Prompt, sampling: SamplingConfig) -> int:
    """Return the largest number of tokens that a completion of `prompt` may have.

    Raises:
        RunFailed: the prompt's own limit leaves no room for a token.
    """
    if prompt.max_tokens is None:
        return sampling.max_completion_length
    if prompt.max_tokens < 1:
        raise RunFailed(
            f"a prompt of group {prompt.group_id} has max_tokens {prompt.max_tokens}; at least is 1"
        )
    return prompt.max_tokens


def request_params(
    sampling: SamplingConfig, end_ids: Sequence[int], prompt: Prompt, seed: int
) -> dict[str, Any]:
    """Return the arguments of vLLM's SamplingParams for the completions of one prompt.

    https://docs.vllm.ai/en/latest/api/vllm/sampling_params.html

    Args:
        end_ids: all tokens that end a completion, including EOS.
        seed: seed of this request; vLLM adds the number of the completion.
    """
    longest = longest_completion(prompt, sampling)
    return {
        "n": prompt.num_samples,
        "seed": seed,
        "max_tokens": longest,
        "min_tokens": min(sampling.min_completion_length, longest),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        # The request names all ending tokens, so vLLM need not know which of them the checkpoint calls EOS.
        "stop_token_ids": list(end_ids),
        "ignore_eos": True,
        "stop": list(sampling.stop),
        # Decoded text is needed only for stop texts.
        "detokenize": bool(sampling.stop),
        "skip_special_tokens": False,
        "logprobs": 0,  # log-probability of the sampled token only
        **sampling.generation_kwargs,
    }


def seed_of(prompt: Prompt, seed: int) -> int:
    """Return the prompt's own seed, or one that depends only on the seed of the call and the prompt's group."""
    if prompt.seed is not None:
        return prompt.seed
    return int(np.random.SeedSequence([seed, prompt.group_id]).generate_state(1)[0])
