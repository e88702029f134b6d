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

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation import GenerationMode
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

from grpox.config import SamplingConfig
from grpox.contracts import GeneratorContext, Prompt, Rollout
from grpox.errors import RunFailed
from grpox.toolkit import upload
from grpox_generators.configs import HfConfig
from grpox_generators.generation_kwargs import LOGITS, OF_ROWS
from grpox_generators.sampling import StopTexts, draw_tokens, processors_of, uniform_numbers

LOOK_EVERY = 16
"""Tokens between two looks of the host at the rows of an accelerator."""
LOOK_EVERY_ON_CPU = 1
"""The same on a CPU, where a look costs nothing."""
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


def is_in_step(config: HfConfig, context: GeneratorContext) -> bool:
    """Tell whether other ranks sample at the same time through the same shards."""
    return not config.gather_weights and context.world_size > 1


def cut(prompts: Sequence[Prompt], batch_size: int) -> list[slice]:
    """Divide prompts into batches of at most `batch_size` completions; a larger group is its own batch."""
    batches, begin, size = [], 0, 0
    for place, prompt in enumerate(prompts):
        if size and size + prompt.num_samples > batch_size:
            batches.append(slice(begin, place))
            begin, size = place, 0
        size += prompt.num_samples
    return [*batches, slice(begin, len(prompts))] if prompts else []


class RoomyLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of one layer, in buffers with room for all tokens to come.

    Args:
        layer: of a `DynamicCache`: keys and values f32[B, K, L, D] of the prompts.
        rows: i64[N], the prompt of each row.
        room: positions of each row, at least L.
    """

    def __init__(self, layer: DynamicLayer, rows: Tensor, room: int) -> None:
        super().__init__()
        keys, values = layer.keys, layer.values
        self.lazy_initialization(keys, values)
        self._keys = keys.new_empty(len(rows), keys.shape[1], room, keys.shape[3])
        self._values = values.new_empty(len(rows), values.shape[1], room, values.shape[3])
        self._length = 0
        self.update(keys.index_select(0, rows), values.index_select(0, rows))

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Add the keys and values f32[N, K, T, D] of new positions; return those of all so far."""
        before, self._length = self._length, self._length + key_states.shape[-2]
        self._keys[:, :, before : self._length] = key_states
        self._values[:, :, before : self._length] = value_states
        self.keys, self.values = self._keys[:, :, : self._length], self._values[:, :, : self._length]
        return self.keys, self.values

    def reorder_cache(self, rows: Tensor) -> None:
        """Go on with the rows i64[M] alone."""
        self._keys, self._values = self._keys.index_select(0, rows), self._values.index_select(0, rows)
        self.keys, self.values = self._keys[:, :, : self._length], self._values[:, :, : self._length]


class RunningRows:
    """The B completions of a batch that are still being sampled, of N at its begin.

    Args:
        model: model of transformers.
        prompts: none on a rank that only follows the forwards of others, with a row of its own.
        limits: largest number of tokens of each prompt's completions.
        ends: tokens that end a completion.
    """

    def __init__(
        self,
        model: Any,
        context: GeneratorContext,
        config: HfConfig,
        prompts: Sequence[Prompt],
        limits: Sequence[int],
        sampling: SamplingConfig,
        ends: Sequence[int],
    ) -> None:
        self.model, self.config, self.sampling = model, config, sampling
        self.prompts, self.most, self.ends, self.tokenizer = prompts, limits, ends, context.tokenizer
        self.in_step = is_in_step(config, context)
        padding = context.tokenizer.pad_token_id
        prompts, limits = prompts or [Prompt(-1, (padding,), 1)], limits or [1]
        sizes = [len(prompt.token_ids) for prompt in prompts]
        # The second column ensures that there are columns to prefill before the last one, and that ranks which
        # generate in step run the same number of forwards.
        self.columns = max(2, *sizes)
        """P, tokens of the longest prompt, at least 2."""
        padded, owners = np.full((len(prompts), self.columns), padding), list[int]()
        for row, prompt in enumerate(prompts):
            padded[row, -sizes[row] :] = prompt.token_ids
            owners += [row] * prompt.num_samples
        # Processors that look at earlier tokens would also see padding: a repetition penalty would penalize the
        # padding token, which often is EOS. So rows of one length and limit are processed together.
        looks_back = sampling.repetition_penalty != 1 or set(LOGITS) & set(sampling.generation_kwargs)
        kinds, kind_of, longest = dict[tuple[int, int], int](), [], max(limits)
        for kind in zip(sizes, limits, strict=True):
            kind_of.append(kinds.setdefault(kind if looks_back else (self.columns, longest), len(kinds)))
        seen = np.arange(self.columns) >= self.columns - np.array(sizes)[:, None]
        facts = np.array([owners, *np.array([sizes, limits, kind_of])[:, owners]])
        arrays = [padded, seen, facts, np.array(ends, dtype=np.int64)]
        input_ids, is_seen, facts_of_rows, self.end_ids = upload(arrays, context.device)
        self.owners, starts, self.limits, self.kinds = facts_of_rows
        """i64[B]: the prompt of each row, its largest number of tokens, and the key of its processors."""
        self.number = torch.arange(len(owners), device=context.device)
        """i64[B]: number of each row in the batch."""
        length = most_of_all_ranks(longest) if self.in_step else longest
        self.tokens = torch.nn.functional.pad(input_ids[self.owners], (0, length))
        """i64[B, P + T]: the prompt, padded on the left, and the completion so far."""
        self.is_seen = torch.nn.functional.pad(is_seen[self.owners], (0, length), value=True)
        """bool[B, P + T]: False where a prompt is padded."""
        self.shifts = starts[:, None] - self.columns
        """i64[B, 1]: a token's position minus its column."""
        self.ended = torch.zeros_like(self.number, dtype=torch.bool)
        """bool[B]: rows whose completion has ended."""
        self.processors: dict[int, tuple[int, LogitsProcessorList]] = {}
        """Kind of rows -> the column where their prompts begin, and transformers' processors."""
        for (size, limit), number in kinds.items():
            start, alike = self.columns - size, slice(None) if len(kinds) == 1 else self.kinds == number
            whole = self.tokens[alike, start : self.columns]
            self.processors[number] = start, processors_of(model, sampling, ends, limit, whole)
        self.cache: Any = None
        self.forward = model if config.cache_implementation == "dynamic" else self._other_forward()
        self.cache = self._prefill(input_ids, is_seen.long())
        self.windows = mask_windows(model, self.cache) if min(sizes) < self.columns else None
        """Windows of `mask_windows`; None: no row is padded."""

    def decode(self, version: int) -> list[Rollout]:
        """Sample until all rows have ended.

        Args:
            version: of the weights.

        Raises:
            RunFailed: some scores are no distribution.
        """
        device, sampling, first = self.number.device, self.sampling, self.columns
        count, end = self.tokens.shape
        sequences, logprobs = self.tokens.clone(), torch.zeros(count, end - first, device=device)
        uniform = uniform_numbers(self.prompts, count, device)
        is_sound = torch.ones((), dtype=torch.bool, device=device)
        least = sampling.min_completion_length
        stops = StopTexts(sampling.stop, self.tokenizer, least) if sampling.stop else None
        text_ends = np.zeros(count, dtype=np.int64)
        may_leave = self.config.cache_implementation == "dynamic" and not self.in_step
        may_leave = may_leave and set(OF_ROWS).isdisjoint(sampling.generation_kwargs)
        every = LOOK_EVERY_ON_CPU if device.type == "cpu" else LOOK_EVERY
        wasted, share = 0.0, 0.0
        for column in range(first, end):
            logits, length = self._logits(column), column + 1 - first
            if share < 1:  # otherwise only the forwards of the other ranks are followed
                scores = self.process(column, logits.to(torch.float32, copy=True))
                numbers = next(uniform)[self.number] if sampling.temperature > 0 else None
                drawn, logprobs[self.number, length - 1], are_sound = draw_tokens(scores, numbers)
                self.tokens[:, column] = drawn
                self.ended |= torch.isin(drawn, self.end_ids) | (self.limits <= length)
                is_sound &= are_sound
            if length % every and column + 1 < end:
                continue
            if share < 1:
                if stops is not None:
                    self._end_by_texts(stops, text_ends, length, (length - 1) % every + 1)
                all_sound, share = torch.stack((is_sound.float(), self.ended.float().mean())).tolist()
                if not all_sound:
                    reason = "an update broke it (a smaller train.learning_rate may help)"
                    if sampling.generation_kwargs:
                        reason += ", or sampling.generation_kwargs forbids every token"
                    what = f"the policy of version {version} gives NaN or infinite probabilities: {reason}"
                    raise RunFailed(what)
            if (share == 1) if not self.in_step else not most_of_all_ranks(int(share < 1)):
                break
            wasted += share * every
            if may_leave and wasted >= CUT_COST:
                sequences[self.number], wasted = self.tokens, 0.0
                self._keep((~self.ended).nonzero().squeeze(1))
        sequences[self.number] = self.tokens
        return self._rollouts(sequences[:, first:].cpu().numpy(), text_ends, logprobs, version)

    def process(self, column: int, scores: Tensor) -> Tensor:
        """Change scores f32[B, V] of the tokens at `column` as the sampling config says."""
        for kind, (start, processors) in self.processors.items():
            if len(self.processors) == 1:
                changed: Tensor = processors(self.tokens[:, start:column], scores)
                return changed
            alike = self.kinds == kind
            scores[alike] = processors(self.tokens[alike, start:column], scores[alike])
        return scores

    def _keep(self, rows: Tensor) -> None:
        """Go on with the rows i64[M] alone."""
        self.cache.reorder_cache(rows)
        for name in ("number", "tokens", "is_seen", "shifts", "limits", "kinds", "ended"):
            setattr(self, name, getattr(self, name)[rows])
        if len(self.processors) > 1:
            self.processors = {kind: self.processors[kind] for kind in set(self.kinds.tolist())}

    def _logits(self, column: int) -> Tensor:
        """Compute the logits [B, V] of the tokens at `column`.

        transformers reads a mask of two dimensions for each token, which waits for the device: one of four is
        taken as it is, and without padding none is needed. A model with several kinds of layers takes a mask
        for each kind.
        """
        is_seen, masks = self.is_seen[:, :column], dict[str, Tensor]()
        mask: Any = is_seen.long() if self.windows == {} else None
        for kind, window in (self.windows or {}).items():
            masks[kind] = mask = (is_seen if window is None else is_seen[:, -window:])[:, None, None]
        output = self.forward(
            input_ids=self.tokens[:, column - 1 : column],
            attention_mask=masks if len(masks) > 1 else mask,
            position_ids=self.shifts + (column - 1),
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = output.logits[:, -1]
        return logits

    def _end_by_texts(self, stops: StopTexts, ends: np.ndarray, length: int, new: int) -> None:
        """End the rows whose text is completed by one of the last `new` tokens.

        Args:
            ends: i64[N], changed in place: number of tokens up to the one that completes a text, 0: none so
                far.
            length: number of tokens of each completion so far; a text that begins in the prompt does not count.
        """
        start = self.columns + max(0, length - new + 1 - stops.window)
        tails = torch.cat((self.number[:, None], self.tokens[:, start : self.columns + length]), dim=1)
        completed = []
        for number, *tail in tails.tolist():
            ends[number] = ends[number] or stops.first_end(tail, length, new)
            completed.append(ends[number] > 0)
        self.ended |= torch.tensor(completed, device=self.ended.device)

    def _rollouts(
        self, tokens: np.ndarray, text_ends: np.ndarray, logprobs: Tensor, version: int
    ) -> list[Rollout]:
        """Cut completions i64[N, T], whose tokens are arbitrary after their ends, and logprobs f32[N, T]."""
        places = np.arange(1, tokens.shape[1] + 1)
        is_end = np.isin(tokens, self.ends) | (places == text_ends[:, None])
        ends = np.where(is_end.any(axis=1), is_end.argmax(axis=1) + 1, tokens.shape[1] + 1)
        columns = zip(tokens.tolist(), logprobs.tolist(), ends.tolist(), strict=True)
        rollouts = []
        for prompt, limit in zip(self.prompts, self.most, strict=True):
            for sample in range(prompt.num_samples):
                token_ids, of_tokens, end = next(columns)
                reason, length = ("stop", end) if end <= limit else ("length", limit)
                of = prompt.group_id, sample, prompt.token_ids, tuple(token_ids[:length])
                rollouts.append(Rollout(*of, reason, version, tuple(of_tokens[:length])))
        return rollouts

    def _prefill(self, input_ids: Tensor, mask: Tensor) -> Any:
        """Return a cache with the keys and values of all prompt tokens but the last, for each row.

        If there is no cache yet, each prompt is computed once, for its whole group, and later nothing but the
        new tokens is copied.

        Args:
            input_ids: i64[B, P] of the prompts.
            mask: i64[B, P], 0 where a prompt is padded.
        """
        of_rows = slice(None) if self.cache is None else self.owners
        mask = mask[of_rows, :-1]
        filled = self.model(
            input_ids=input_ids[of_rows, :-1],
            attention_mask=mask,
            position_ids=(mask.cumsum(dim=1) - 1).clamp(min=0),
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        ).past_key_values
        for place, layer in enumerate(filled.layers if self.cache is None else ()):
            if type(layer) is DynamicLayer:
                filled.layers[place] = RoomyLayer(layer, self.owners, self.tokens.shape[1])
            else:  # a window of the last positions, or states of another kind
                layer.reorder_cache(self.owners)
        return filled

    def _other_forward(self) -> Callable[..., Any]:
        """Use the cache that transformers makes for all rows; return what computes a token with it.

        For a cache of fixed size on CUDA that is the forward pass compiled, as in transformers' generate.
        """
        own, names = self.sampling.generation_kwargs, ("cache_config", "max_cache_len", "disable_compile")
        config = GenerationConfig(
            **{"disable_compile": not self.config.gather_weights}
            | {name: own[name] for name in names if name in own},
            cache_implementation=self.config.cache_implementation,
            num_beams=1,
            num_return_sequences=1,
        )
        inputs: dict[str, Any] = {}
        sizes = self.tokens.shape[0], self.tokens.shape[1] - 1
        self.model._prepare_cache_for_generation(config, inputs, GenerationMode.GREEDY_SEARCH, *sizes)
        self.cache = inputs["past_key_values"]
        if not self.model._valid_auto_compile_criteria(inputs, config):
            return self.model  # type: ignore[no-any-return]
        forward = self.model.get_compiled_call(None)
        # Prepared inputs have the same shapes for each token, also the masks.
        prepare = self.model.prepare_inputs_for_generation
        return lambda **of_token: forward(**prepare(**of_token))


KINDS = {
    RoomyLayer: "full_attention",
    DynamicLayer: "full_attention",
    DynamicSlidingWindowLayer: "sliding_attention",
}
"""Layers of a cache, and transformers' names for what their masks let a token see."""


def mask_windows(model: Any, cache: Any) -> dict[str, int | None]:
    """Return how many positions each kind of layers sees, None: all; empty if transformers must make the
    masks."""
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    layers = {(KINDS.get(type(each), ""), getattr(each, "sliding_window", None)) for each in cache.layers}
    windows = dict(layers)
    is_chunked = getattr(config, "attention_chunk_size", None) is not None
    # One mask serves a model whose layers are alike; by `layer_types` it takes a mask for each of them.
    is_known = set(windows) == set(kinds) if kinds else len(layers) == 1 and not is_chunked
    takes_masks = ALL_MASK_ATTENTION_FUNCTIONS.get(config._attn_implementation) is sdpa_mask
    is_usable = takes_masks and is_known and len(windows) == len(layers)
    return windows if is_usable and set(windows) <= set(KINDS.values()) else {}
