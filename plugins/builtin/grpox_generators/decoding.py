"""Completions sampled together, a token at a time; rows that have ended leave the batch.

A batch is padded on the left. Its keys and values lie in buffers with room for the longest completion, so that
a new token copies nothing but its own. On an accelerator the host looks at what was computed only every
`LOOK_EVERY` tokens: each look waits for the device.

Through the policy's own ZeRO-3 shards each layer is gathered for each token, on all ranks. A gather is a
collective, so all ranks must run the same number of forwards: as many batches on each rank, all of them until
the last row of any rank has ended, and rows for a rank that has none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

from grpox.config import SamplingConfig
from grpox.contracts import Prompt
from grpox_generators.sampling import Distribution, Draw, StopTexts, longest_completion, own_uniform

LOOK_EVERY = 16
"""Tokens between two looks of the host at the rows of an accelerator."""
CUT_COST = 0.2
"""Cost of a cut, in steps of the whole batch: it copies the keys and values of the rows that stay."""


@contextmanager
def generating(policy: Any) -> Iterator[None]:
    """Let the policy generate: in evaluation mode and without the checkpoint's sampling defaults.

    Evaluation mode also turns off gradient checkpointing, which forbids a cache of keys and values.
    """
    training, defaults = policy.training, policy.generation_config
    policy.eval()
    policy.generation_config = GenerationConfig()
    try:
        yield
    finally:
        policy.generation_config = defaults
        policy.train(training)


def most_of_all_ranks(number: int) -> int:
    """Return the largest `number` of all ranks; a collective."""
    largest = torch.tensor(number)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest)


def cut(prompts: Sequence[Prompt], batch_size: int) -> Iterator[list[Prompt]]:
    """Split into batches of at most `batch_size` completions, whole groups; a larger group is its own batch."""
    batch: list[Prompt] = []
    size = 0
    for prompt in prompts:
        if batch and size + prompt.num_samples > batch_size:
            yield batch
            batch, size = [], 0
        batch.append(prompt)
        size += prompt.num_samples
    if batch:
        yield batch


class RoomyLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of one layer, in buffers with room for all tokens to come.

    Args:
        layer: of a `DynamicCache`: keys and values f32[B, K, L, D] of the prompts.
        rows: i64[N], the prompt of each row.
        room: positions of each row, at least L.
    """

    def __init__(self, layer: DynamicLayer, rows: Tensor, room: int) -> None:
        super().__init__()
        self.lazy_initialization(layer.keys, layer.values)
        self._keys, self._values = (
            part.new_empty(len(rows), part.shape[1], room, part.shape[3]) for part in (layer.keys, layer.values)
        )
        self._length = 0
        self.update(layer.keys.index_select(0, rows), layer.values.index_select(0, rows))

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Add the keys and values f32[N, K, T, D] of new positions; return those of all so far."""
        before, self._length = self._length, self._length + key_states.shape[-2]
        self._keys[:, :, before : self._length] = key_states
        self._values[:, :, before : self._length] = value_states
        self._show()
        return self.keys, self.values

    def reorder_cache(self, rows: Tensor) -> None:
        """Go on with the rows i64[M] alone."""
        self._keys, self._values = self._keys.index_select(0, rows), self._values.index_select(0, rows)
        self._show()

    def _show(self) -> None:
        self.keys, self.values = self._keys[:, :, : self._length], self._values[:, :, : self._length]


class Batch:
    """N completions of B prompts that are sampled together.

    Args:
        model: model of transformers.
        prompts: none on a rank that only follows the forwards of others, with a row of its own.
        end_ids: tokens that end a completion.
        in_step: True: other ranks sample at the same time through the same shards.
    """

    def __init__(
        self,
        model: Any,
        prompts: Sequence[Prompt],
        sampling: SamplingConfig,
        end_ids: Sequence[int],
        tokenizer: PreTrainedTokenizerBase,
        device: torch.device,
        in_step: bool,
    ) -> None:
        self.model, self.prompts, self.end_ids, self.in_step = model, prompts, end_ids, in_step
        given = prompts or [Prompt(-1, (tokenizer.pad_token_id,), 1)]
        sizes = [len(prompt.token_ids) for prompt in given]
        # The second column ensures that there are columns to prefill before the last one, and that ranks which
        # generate in step run the same number of forwards.
        self.columns = max(2, *sizes)
        """P, tokens of the longest prompt, at least 2."""
        self.is_padded = min(sizes) < self.columns
        input_ids = torch.full((len(given), self.columns), tokenizer.pad_token_id)
        attention_mask = torch.zeros_like(input_ids)
        for row, prompt in enumerate(given):
            input_ids[row, -sizes[row] :] = torch.tensor(prompt.token_ids)
            attention_mask[row, -sizes[row] :] = 1
        self.input_ids, self.attention_mask = input_ids.to(device), attention_mask.to(device)
        """i64[B, P], padded on the left."""
        repeats = torch.tensor([prompt.num_samples for prompt in given]).to(device)
        self.rows = torch.arange(len(given), device=device).repeat_interleave(repeats)
        """i64[N]: number of the prompt of each completion."""
        limits = [longest_completion(prompt, sampling) for prompt in prompts] or [1]
        self.length = most_of_all_ranks(max(limits)) if in_step else max(limits)
        """T, largest number of tokens of a completion."""
        self.limits = torch.tensor(limits, device=device)[self.rows]
        """i64[N]: largest number of tokens of each completion."""
        prepared = self.input_ids[self.rows], self.attention_mask.sum(dim=1)[self.rows], self.limits
        self.distribution = Distribution(model, sampling, end_ids, *prepared)
        uniform = own_uniform(prompts, device)
        self.draw = Draw(len(self.rows), self.length, sampling.temperature == 0, device, uniform)
        self.stops = StopTexts(sampling.stop, tokenizer, len(self.rows), sampling.min_completion_length)
        if not prompts:
            self.stops.ends = [0]

    def decode(self, leave: bool, cache: Any = None, step: Callable[..., Any] | None = None) -> Tensor:
        """Sample until all rows have ended.

        Args:
            leave: True: ended rows leave; no other rank may be in step, and the cache must be the default.
            cache: empty cache of transformers for all rows; default: one in which each prompt is computed
                once, for its whole group, and nothing but the new tokens is copied.
            step: computes the forward of one token of each row; default: the model.

        Returns:
            i64[N, T]: completions, then arbitrary tokens.
        """
        rows, first, end = self.rows, self.columns, self.columns + self.length
        device, forward = rows.device, step or self.model
        tokens = torch.nn.functional.pad(self.input_ids[rows], (0, self.length))
        sequences, running = tokens.clone(), torch.arange(len(rows), device=device)
        seen = torch.nn.functional.pad(self.attention_mask[rows], (0, self.length), value=1).bool()
        positions = self.attention_mask.sum(dim=1)[rows, None] - first
        limits = self.limits
        ends = torch.tensor(list(self.end_ids), dtype=torch.long, device=device)
        ended = torch.zeros(len(rows), dtype=torch.bool, device=device)
        cache = self._prefill(cache)
        masks = Masks(self.model, cache, self.is_padded)
        every, wasted, share, looked = tokens_between_looks(device), 0.0, 0.0, first
        for column in range(first, end):
            logits = forward(
                input_ids=tokens[:, column - 1 : column],
                attention_mask=masks.of(seen[:, :column]),
                position_ids=positions + (column - 1),
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits[:, -1]
            is_look = (column + 1 - first) % every == 0 or column + 1 == end
            if share < 1:  # otherwise only the forwards of the other ranks are followed
                scores = self.distribution(tokens[:, :column], logits.to(torch.float32, copy=True))
                tokens[:, column] = drawn = self.draw.take(scores)
                ended |= torch.isin(drawn, ends) | (limits <= column + 1 - first)
            if not is_look:
                continue
            if share < 1:
                ended |= self.stops.look(tokens[:, first : column + 1], column + 1 - looked)
                looked, share = column + 1, self.draw.look(ended)
            if (share == 1) if not self.in_step else not most_of_all_ranks(int(share < 1)):
                break
            wasted += share * every
            if leave and wasted >= CUT_COST:
                sequences[running] = tokens
                remaining = ~ended
                stay = remaining.nonzero().squeeze(1)
                cache.reorder_cache(stay)
                for part in (self.distribution, self.draw, self.stops):
                    part.keep(remaining)
                running, tokens, seen, positions = (part[stay] for part in (running, tokens, seen, positions))
                limits, ended, wasted = limits[stay], ended[stay], 0.0
        sequences[running] = tokens
        return sequences[:, first:]

    def _prefill(self, cache: Any) -> Any:
        """Return a cache with the keys and values of all prompt tokens but the last, for each row."""
        of_rows = slice(None) if cache is None else self.rows
        mask = self.attention_mask[of_rows, :-1]
        filled = self.model(
            input_ids=self.input_ids[of_rows, :-1],
            attention_mask=mask,
            position_ids=(mask.cumsum(dim=1) - 1).clamp(min=0),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).past_key_values
        for place, layer in enumerate(filled.layers if cache is None else ()):
            if type(layer) is DynamicLayer:
                filled.layers[place] = RoomyLayer(layer, self.rows, self.columns + self.length)
            else:  # a window of the last positions, or states of another kind
                layer.reorder_cache(self.rows)
        return filled


def tokens_between_looks(device: torch.device) -> int:
    """Return after how many tokens the host looks; on a CPU a look costs nothing."""
    return 1 if device.type == "cpu" else LOOK_EVERY


KINDS = {
    RoomyLayer: "full_attention",
    DynamicLayer: "full_attention",
    DynamicSlidingWindowLayer: "sliding_attention",
}
"""Layers of a cache, and transformers' names for what their masks let a token see."""


class Masks:
    """Attention masks for a new token of each row, which transformers need not look into.

    It reads a mask of two dimensions for each token, which waits for the device: one of four is taken as it is,
    and without padding none is needed. A model with several kinds of layers takes a mask for each kind.
    """

    def __init__(self, model: Any, cache: Any, is_padded: bool) -> None:
        config = model.config.get_text_config()
        self._is_padded = is_padded
        self._windows: dict[str, int | None] = {}
        """Positions that each kind of layers sees, None: all; empty: the masks are left to transformers."""
        kinds = getattr(config, "layer_types", None)
        layers = {(KINDS.get(type(each), ""), getattr(each, "sliding_window", None)) for each in cache.layers}
        windows = dict(layers)
        is_chunked = getattr(config, "attention_chunk_size", None) is not None
        # One mask serves a model whose layers are alike; by `layer_types` it takes a mask for each of them.
        is_known = set(windows) == set(kinds) if kinds else len(layers) == 1 and not is_chunked
        takes_masks = ALL_MASK_ATTENTION_FUNCTIONS.get(config._attn_implementation) is sdpa_mask
        if takes_masks and is_known and len(windows) == len(layers) and set(windows) <= set(KINDS.values()):
            self._windows = windows

    def of(self, seen: Tensor) -> Tensor | dict[str, Tensor] | None:
        """Return the masks for keys that are `seen`, bool[N, L]; None: all are."""
        if not self._is_padded:
            return None
        if not self._windows:
            return seen.long()
        masks = {
            kind: (seen if window is None else seen[:, -window:])[:, None, None]
            for kind, window in self._windows.items()
        }
        return masks if len(masks) > 1 else next(iter(masks.values()))
