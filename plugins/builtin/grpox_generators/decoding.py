"""Completions sampled together, a token at a time; rows that have ended leave the batch.

A batch is padded on the left. Its keys and values lie in buffers with room for the longest completion, so that
a new token copies nothing but its own. On an accelerator the host looks at what was computed only every
`LOOK_EVERY` tokens: each look waits for the device.

Through the policy's own ZeRO-3 shards each layer is gathered for each token, on all ranks. A gather is a
collective, so all ranks must run the same number of forwards: as many batches on each rank, all of them until
the last row of any rank has ended, and rows for a rank that has none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import GenerationConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

from grpox.contracts import Prompt
from grpox_generators.sampling import Distribution, Draw, StopTexts

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


@dataclass(frozen=True)
class PaddedPrompts:
    """B prompts; P is the length of the longest, at least 2."""

    input_ids: Tensor  # i64[B, P]
    attention_mask: Tensor  # i64[B, P]
    repeats: Tensor  # i64[B]: completions of each
    is_padded: bool
    """True where not all are of length P."""

    @property
    def lengths(self) -> Tensor:
        """i64[B]: number of tokens of each prompt."""
        return self.attention_mask.sum(dim=1)

    @property
    def group_rows(self) -> Tensor:
        """i64[N]: number of the prompt of each completion."""
        return torch.arange(len(self.repeats), device=self.repeats.device).repeat_interleave(self.repeats)


def pad_prompts(prompts: Sequence[Prompt], pad_token_id: int, device: torch.device) -> PaddedPrompts:
    """Pad to the longest prompt, and to 2 at least.

    The second column ensures that there are columns to prefill before the last one, and that ranks which
    generate in step run the same number of forwards.
    """
    length = max(2, *(len(prompt.token_ids) for prompt in prompts))
    input_ids = torch.full((len(prompts), length), pad_token_id)
    attention_mask = torch.zeros_like(input_ids)
    for row, prompt in enumerate(prompts):
        input_ids[row, length - len(prompt.token_ids) :] = torch.tensor(prompt.token_ids)
        attention_mask[row, length - len(prompt.token_ids) :] = 1
    repeats = torch.tensor([prompt.num_samples for prompt in prompts])
    is_padded = any(len(prompt.token_ids) < length for prompt in prompts)
    return PaddedPrompts(input_ids.to(device), attention_mask.to(device), repeats.to(device), is_padded)


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
        self._length = layer.keys.shape[-2]
        self._keys, self._values = (_with_room(part, rows, room) for part in (layer.keys, layer.values))
        self._show()

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


def _with_room(part: Tensor, rows: Tensor, room: int) -> Tensor:
    buffer = part.new_empty(len(rows), part.shape[1], room, part.shape[3])
    buffer[:, :, : part.shape[2]] = part.index_select(0, rows)
    return buffer


@dataclass
class Batch:
    """N completions that are sampled together, of at most T tokens."""

    prompts: PaddedPrompts
    length: int
    """T."""
    end_ids: Sequence[int]
    """Tokens that end a row."""
    distribution: Distribution
    draw: Draw
    stop: StopTexts
    limits: Tensor | None = None
    """i64[N], the longest of each completion; None: T of all."""

    def decode(self, model: Any, cache: Any, leave: bool, in_step: bool) -> Tensor:
        """Sample until all rows have ended.

        Args:
            model: model of transformers.
            cache: keys and values of all prompt tokens but the last, a row for each prompt.
            leave: True: ended rows leave; no other rank may be in step.
            in_step: True: other ranks sample at the same time through the same shards.

        Returns:
            i64[N, P + T]: prompts with padding, then completions, then arbitrary tokens.
        """
        prompts, device = self.prompts, self.prompts.input_ids.device
        first, end = prompts.input_ids.shape[1], prompts.input_ids.shape[1] + self.length
        rows = prompts.group_rows
        tokens = torch.nn.functional.pad(prompts.input_ids[rows], (0, self.length))
        sequences, running = tokens.clone(), torch.arange(len(rows), device=device)
        seen = torch.nn.functional.pad(prompts.attention_mask[rows], (0, self.length), value=1).bool()
        positions = prompts.lengths[rows, None] - 1 - (first - 1)
        limits, ends = self.limits, torch.tensor(list(self.end_ids), dtype=torch.long, device=device)
        ended = torch.zeros(len(rows), dtype=torch.bool, device=device)
        masks = Masks(model, cache, prompts.is_padded)
        make_room(cache, rows, end)
        every, wasted, share, looked = tokens_between_looks(device), 0.0, 0.0, first
        for column in range(first, end):
            logits = model(
                input_ids=tokens[:, column - 1 : column],
                attention_mask=masks.of(seen[:, :column]),
                position_ids=positions + (column - 1),
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits[:, -1]
            is_look = (column + 1 - first) % every == 0 or column + 1 == end
            if share == 1:  # only the forwards of the other ranks are followed
                if is_look and is_over(True, in_step):
                    break
                continue
            scores = self.distribution(tokens[:, :column], logits.to(torch.float32, copy=True))
            tokens[:, column] = drawn = self.draw.take(scores)
            ended |= torch.isin(drawn, ends)
            if limits is not None:
                ended |= limits <= column + 1 - first
            if not is_look:
                continue
            ended |= self.stop.look(tokens[:, : column + 1], column + 1 - looked)
            looked = column + 1
            share = self.draw.look(ended)
            if is_over(share == 1, in_step):
                break
            wasted += share * every
            if leave and wasted >= CUT_COST:
                sequences[running] = tokens
                stay = self._keep(~ended, cache)
                running, tokens, seen, positions = (part[stay] for part in (running, tokens, seen, positions))
                limits = None if limits is None else limits[stay]
                ended, wasted = ended[stay], 0.0
        sequences[running] = tokens
        return sequences

    def _keep(self, remaining: Tensor, cache: Any) -> Tensor:
        """Go on with the rows bool[B] alone; return their numbers, i64[M]."""
        stay = remaining.nonzero().squeeze(1)
        cache.reorder_cache(stay)
        for part in (self.distribution, self.draw, self.stop):
            part.keep(remaining)
        return stay


def make_room(cache: Any, rows: Tensor, room: int) -> None:
    """Give each row its prompt's keys and values, with `room` positions where the layer can have them."""
    for place, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer:
            cache.layers[place] = RoomyLayer(layer, rows, room)
        else:  # a window of the last positions, or states of another kind
            layer.reorder_cache(rows)


def tokens_between_looks(device: torch.device) -> int:
    """Return after how many tokens the host looks; on a CPU a look costs nothing."""
    return 1 if device.type == "cpu" else LOOK_EVERY


def is_over(is_done: bool, in_step: bool) -> bool:
    """Tell whether all rows have ended: of this rank, or of all that are in step (a collective)."""
    return is_done if not in_step else not most_of_all_ranks(int(not is_done))


KINDS = {DynamicLayer: "full_attention", DynamicSlidingWindowLayer: "sliding_attention"}
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
        # One mask serves a model whose layers are alike; by `layer_types` it takes a mask for each of them.
        is_known = set(windows) == set(kinds) if kinds else len(layers) == 1 and not _is_chunked(config)
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


def _is_chunked(config: Any) -> bool:
    return getattr(config, "attention_chunk_size", None) is not None
