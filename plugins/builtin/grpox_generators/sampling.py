"""Parts of sampling by token: the distribution, the draw of each token, and texts that end a completion.

Logits processors form the distribution. A token is drawn by the inverse of the cumulative probabilities, with
one uniform number per row: torch.multinomial draws a random number for each token of the vocabulary, which on
a CPU takes longer than the model's attention. A prompt can have its own seed.

A completion ends with the first token that completes a stop text. The search uses the decoded text, not the
tokens' spellings, because a character may span several tokens.

All generators share the ends of completions and the limits of positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedTokenizerBase

from grpox.config import SamplingConfig
from grpox.contracts import Prompt
from grpox.errors import ConfigError, RunFailed
from grpox.toolkit import text_of, upload
from grpox_generators.generation_kwargs import LOGITS, RUNTIME, WARPERS


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


def processors_of(
    model: Any, sampling: SamplingConfig, end_ids: Sequence[int], limit: int, prompts: Tensor
) -> LogitsProcessorList:
    """Return the logits processors of a sampling config, created and ordered by transformers.

    Args:
        model: model that provides them.
        end_ids: as for `distribution_config`.
        limit: largest number of tokens of a completion.
        prompts: i64[N, P] of the rows to process, without padding.
    """
    config = distribution_config(sampling, end_ids)
    config.max_length = prompts.shape[1] + limit
    config._eos_token_tensor = torch.tensor(list(end_ids), device=prompts.device) if end_ids else None
    try:
        processors: LogitsProcessorList = model._get_logits_processor(
            config, input_ids_seq_length=prompts.shape[1], encoder_input_ids=prompts, device=prompts.device
        )
    except (TypeError, ValueError) as error:
        raise refused_kwargs(sampling, error) from error
    return processors


BLOCK = 256
"""Tokens whose probabilities are summed in float32, which is as exact as a float32 softmax itself. Sums of
blocks are float64."""
AT_A_TIME = 64
"""Number of tokens for which a prompt's random numbers are drawn at once. Another value gives other numbers."""


def draw_tokens(scores: Tensor, uniform: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Draw the next token of each row.

    Args:
        scores: f32[B, V].
        uniform: f64[B, 1], uniform numbers; None: take the most likely token.

    Returns:
        The tokens i64[B], their log-probabilities f32[B], and bool[], which is False if the scores of a row are
        no distribution: they are not finite, or every token is forbidden.
    """
    probabilities = scores.softmax(dim=-1)
    whole = probabilities.shape[1] // BLOCK * BLOCK
    if whole <= BLOCK:
        blocks = probabilities.cumsum(dim=-1, dtype=torch.float64)[:, -1:]
    else:
        sums = [probabilities[:, :whole].view(len(probabilities), -1, BLOCK).sum(dim=-1)]
        if whole < probabilities.shape[1]:
            sums.append(probabilities[:, whole:].sum(dim=-1, keepdim=True))
        blocks = torch.cat(sums, dim=1).double().cumsum(dim=-1)
    total = blocks[:, -1:]
    if uniform is None:
        tokens = scores.argmax(dim=-1, keepdim=True)
    else:
        tokens = _invert(probabilities, blocks, uniform * total)
    # Where one token of many is likely, the float32 softmax's own sum is off by 1e-5.
    drawn = probabilities.gather(-1, tokens) / total
    return tokens.squeeze(-1), drawn.log().squeeze(-1).float(), total.isfinite().all()


def _invert(probabilities: Tensor, blocks: Tensor, wanted: Tensor) -> Tensor:
    """Return the tokens i64[B, 1] at which the cumulated probabilities exceed numbers: first a block, then a
    token of it.

    A uniform number is at most 1 - 2^-53, so the number looked for is less than the last sum, and the first
    sum above it is that of a block, or a token, of positive probability. For a row that is no distribution
    any token is returned.

    Args:
        probabilities: f32[B, V].
        blocks: f64[B, C], cumulated sums of blocks of `BLOCK` and a rest; C is 1 if they are few.
        wanted: f64[B, 1], numbers below the last sums.
    """
    last = probabilities.shape[1] - 1
    if blocks.shape[1] == 1:
        sums = probabilities.cumsum(dim=-1, dtype=torch.float64)
        return torch.searchsorted(sums, wanted, right=True).clamp(max=last)
    block = torch.searchsorted(blocks, wanted, right=True).clamp(max=blocks.shape[1] - 1)
    before = torch.where(block > 0, blocks.gather(1, (block - 1).clamp(min=0)), 0.0)
    places = block * BLOCK + torch.arange(BLOCK, device=blocks.device)
    inside = probabilities.gather(1, places.clamp(max=last))
    sums = inside.masked_fill(places > last, 0).cumsum(dim=-1, dtype=torch.float64)
    # A block's own sum is float32: scaled to it, the number stays below the last of `sums`.
    size = blocks.gather(1, block) - before
    wanted = ((wanted - before) / size * sums[:, -1:]).minimum(sums[:, -1:] * (1 - 2**-52))
    return (block * BLOCK + torch.searchsorted(sums, wanted, right=True)).clamp(max=last)


def uniform_numbers(prompts: Sequence[Prompt], rows: int, device: torch.device) -> Iterator[Tensor]:
    """Yield uniform numbers f64[N, 1] for each next token, one per completion, however many of them still run.

    If every prompt has a seed, each has a random generator on the CPU, so that every device samples the same.
    Otherwise the numbers are of torch's global state.
    """
    seeds = [prompt.seed for prompt in prompts if prompt.seed is not None]
    while not prompts or len(seeds) < len(prompts):
        yield torch.rand(rows, 1, dtype=torch.float64, device=device)
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    while True:
        drawn = [
            torch.rand(prompt.num_samples, AT_A_TIME, generator=generator, dtype=torch.float64)
            for generator, prompt in zip(generators, prompts, strict=True)
        ]
        [of_tokens] = upload([torch.cat(drawn).numpy()], device)
        yield from torch.split(of_tokens, 1, dim=1)


class StopTexts:
    """Finds the token that completes a stop text.

    Args:
        texts: stop texts, none of them empty.
        tokenizer: decodes the tokens; special tokens are part of the text.
        min_length: a text completed within this number of tokens does not count, as EOS is suppressed there
            too.
    """

    def __init__(self, texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, min_length: int) -> None:
        self.texts = texts
        self.tokenizer = tokenizer
        self.min_length = min_length
        # A token has at least one byte. Four more tokens make the first character of the text whole.
        self.window = max((len(text.encode()) for text in texts), default=0) + 4
        """Number of last tokens that can have part in a text."""
        self._may_complete: dict[int, bool] = {}

    def first_end(self, tail: Sequence[int], length: int, new: int) -> int:
        """Return the number of tokens up to the first of the `new` ones that completes a text, 0 if none does.

        Args:
            tail: the last tokens of a completion, `window` before the last of the new ones or all.
            length: number of tokens of the completion so far.
        """
        start = length - len(tail)
        for end in range(max(length - new, self.min_length) + 1, length + 1):
            seen = tail[max(0, end - self.window - start) : end - start]
            if self._candidate(seen[-1]) and self.completes(seen):
                return end
        return 0

    def completes(self, token_ids: Sequence[int]) -> bool:
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

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=False))


def end_ids(sampling: SamplingConfig, stop_token_ids: Sequence[int], vocabulary: int) -> tuple[int, ...]:
    """Return the tokens that end a completion: those of model and tokenizer, and those of the run file.

    Raises:
        ConfigError: a token of the run file is not in the vocabulary.
    """
    if outside := [token for token in sampling.stop_token_ids if not 0 <= token < vocabulary]:
        what = "is not in the model's vocabulary"
        given, allowed = ", ".join(map(str, outside)), f"0 to {vocabulary - 1}"
        raise ConfigError(what, "sampling.stop_token_ids", given=given, allowed=allowed)
    return tuple(dict.fromkeys((*stop_token_ids, *sampling.stop_token_ids)))


def longest_completions(
    prompts: Sequence[Prompt], sampling: SamplingConfig, positions: int | None, whose: str
) -> list[int]:
    """Return the largest number of tokens that completions of each prompt may have.

    Args:
        positions: limit of prompt and completion together; None means no limit.
        whose: owner of the limit, for the message.

    Raises:
        RunFailed: a prompt and its longest completion do not fit together, or its own limit leaves no room for
            a token.
    """
    limits, most, longest = list[int](), 0, 0
    for prompt in prompts:
        limit = sampling.max_completion_length if prompt.max_tokens is None else prompt.max_tokens
        if limit < 1:
            raise RunFailed(f"a prompt of group {prompt.group_id} has max_tokens {limit}; at least is 1")
        if len(prompt.token_ids) + limit > most:
            most, longest = len(prompt.token_ids) + limit, len(limits)
        limits.append(limit)
    if positions is not None and most > positions:
        key = "sampling.max_completion_length" if prompts[longest].max_tokens is None else "its max_tokens"
        sizes = f"a prompt of {most - limits[longest]} tokens plus {key} {limits[longest]}"
        raise RunFailed(f"{sizes} exceed the {positions} positions of {whose}")
    return limits
