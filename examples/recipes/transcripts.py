"""Transcripts of episodes, as tokens: to warm-start a small model on them, and to play new ones with it.

The tokens are those of a run: the prompt, then turns of the model, each with its end token, and between them
the environment's answers, each tokenised by itself.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from grpox.environments import Environment

IGNORED = -100  # transformers' label for positions without loss


@dataclass
class Transcript:
    """The token ids of an episode, and for each True if the model wrote it."""

    tokenizer: PreTrainedTokenizerBase
    ids: list[int] = field(default_factory=list)
    of_model: list[bool] = field(default_factory=list)

    def add(self, text: str, by_model: bool = False) -> Transcript:
        """Append a turn of the model, with its end token, or another text."""
        ids = [*_token_ids(self.tokenizer, text), *[self.tokenizer.eos_token_id] * by_model]
        self.ids += ids
        self.of_model += [by_model] * len(ids)
        return self


@cache
def _token_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = tokenizer(text)["input_ids"]
    return ids


def teacher_batch(transcripts: Sequence[Transcript], learn_all: bool = False) -> dict[str, torch.Tensor]:
    """Make a batch, padded on the right; the loss is on the model's tokens alone, or on all."""
    longest = max(len(each.ids) for each in transcripts)
    ids = torch.zeros(len(transcripts), longest, dtype=torch.long)
    labels = torch.full_like(ids, IGNORED)
    for row, each in enumerate(transcripts):
        tokens, end = torch.tensor(each.ids), len(each.ids)
        ids[row, :end] = tokens
        learned = torch.tensor(each.of_model) | learn_all
        labels[row, :end] = tokens.masked_fill(~learned, IGNORED)
    return {"input_ids": ids, "labels": labels}  # what is right of a row's end has no influence on it


@torch.inference_mode()
def play(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    environments: Sequence[Environment],
    rows: Sequence[dict[str, Any]],
    max_turns: int,
    max_turn_tokens: int,
    do_sample: bool = False,
) -> list[Transcript]:
    """Play an episode in each environment; the environments keep how it ended."""
    transcripts = [Transcript(tokenizer).add(row["prompt"]) for row in rows]
    for begun, environment, row in zip(transcripts, environments, rows, strict=True):
        opening = environment.reset(row, 0)
        assert opening is None or isinstance(opening, str)
        begun.add(opening or "")
    unfinished = list(range(len(rows)))
    for _ in range(max_turns):
        if not unfinished:
            break
        turns = sample(model, [transcripts[i] for i in unfinished], max_turn_tokens, do_sample)
        still: list[int] = []
        for i, turn in zip(unfinished, turns, strict=True):
            transcripts[i].ids += turn
            transcripts[i].of_model += [True] * len(turn)
            if turn[-1] != tokenizer.eos_token_id:
                continue  # cut off: such a turn is not read
            answer = respond(environments[i], tokenizer.decode(turn, skip_special_tokens=True))
            if answer is not None and not environments[i].done:
                transcripts[i].add(answer)
                still.append(i)
        unfinished = still
    return transcripts


def respond(environment: Environment, text: str) -> str | None:
    """Return the environment's answer to a turn, by its one tool or by `reply`."""
    calls = environment.parse(text)
    if calls:
        return "".join(getattr(environment, call.name)(**json.loads(call.arguments)) for call in calls)
    answer = environment.reply(text)
    assert answer is None or isinstance(answer, str)
    return answer


def sample(
    model: LlamaForCausalLM, transcripts: Sequence[Transcript], max_tokens: int, do_sample: bool
) -> list[list[int]]:
    """Sample a turn after each transcript; its end token included."""
    eos, pad = model.config.eos_token_id, model.config.pad_token_id
    longest = max(len(each.ids) for each in transcripts)
    ids = torch.tensor([[pad] * (longest - len(each.ids)) + each.ids for each in transcripts])
    mask = torch.tensor([[0] * (longest - len(each.ids)) + [1] * len(each.ids) for each in transcripts])
    model.eval()
    given = {"max_new_tokens": max_tokens, "do_sample": do_sample, **({"top_k": 0} if do_sample else {})}
    output = model.generate(input_ids=ids, attention_mask=mask, **given)[:, longest:].tolist()
    return [turn[: turn.index(eos) + 1] if eos in turn else turn for turn in output]
