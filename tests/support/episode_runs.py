"""Runs of episodes whose rollouts are kept, and the checks of their tokens against the model itself."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpox.contracts import Rollout

FILE = """
import pickle
from pathlib import Path

import grpox
from grpox.environments import Environment, tool


class Keep:
    @grpox.hookimpl
    def grpox_rollouts_scored(self, run, step, rollouts):
        kept = [each.rollout for each in rollouts]
        Path(run.output_dir, f"rollouts-{step}.pickle").write_bytes(pickle.dumps(kept))


class Again(Environment):
    '''Answers each turn with a text of its own, for a number of turns that depends on the row.'''

    def reset(self, row, seed):
        self.turns, self.most = 0, 1 + len(str(row["prompt"])) % 3
        return None if len(str(row["prompt"])) % 2 else self.greeting

    greeting = "1+"

    def reply(self, text):
        self.turns += 1
        return None if self.turns > self.most else f"+{self.turns}="

    def info(self):
        return {"turns": self.turns}


class Chat(Again):
    greeting = "Be brief."

    def reply(self, text):
        self.turns += 1
        return None if self.turns > 2 else f"And what is {self.turns} + 3?"
"""


def kept_rollouts(run: Path, step: int = 1) -> list[Rollout]:
    """Return the rollouts of a step that the run's observer kept."""
    rollouts: list[Rollout] = pickle.loads((run / f"rollouts-{step}.pickle").read_bytes())
    return rollouts


def largest_difference(model: Path, rollouts: Sequence[Rollout]) -> float:
    """Return the largest difference between the sampler's log-probabilities of the model's tokens and those of
    one forward over the whole sequence; checks that all other tokens have none."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    largest = 0.0
    for rollout in rollouts:
        ids = torch.tensor([[*rollout.prompt_ids, *rollout.completion_ids]])
        with torch.no_grad():
            logits = policy(ids).logits[0, len(rollout.prompt_ids) - 1 : -1]
        picked = torch.tensor(rollout.completion_ids).unsqueeze(1)
        expected = logits.log_softmax(dim=-1).gather(1, picked).squeeze(1)
        reported = torch.tensor(rollout.sampler_logprobs)
        mask = torch.ones(len(reported), dtype=torch.bool)
        if rollout.model_mask is not None:
            mask = torch.tensor(rollout.model_mask)
        assert bool(reported[~mask].isnan().all())
        largest = max(largest, float((expected - reported)[mask].abs().max()))
    return largest


def check_text_of_plain(model: Path, rollouts: Sequence[Rollout]) -> None:
    """Check that the tokens of episodes with plain prompts decode to their conversations."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    for rollout in rollouts:
        assert rollout.episode is not None
        (*parts,) = (message["content"] for message in rollout.episode.messages)
        text = tokenizer.decode([*rollout.prompt_ids, *rollout.completion_ids], skip_special_tokens=True)
        assert text.replace(" ", "").endswith("".join(parts).replace(" ", "")), (text, parts)


def check_text_of_chat(model: Path, prompts: Sequence[str], rollouts: Sequence[Rollout]) -> None:
    """Check that the tokens of episodes of messages decode to what the chat template writes of them."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    for rollout in rollouts:
        assert rollout.episode is not None
        text = tokenizer.decode([*rollout.prompt_ids, *rollout.completion_ids], skip_special_tokens=False)
        prompt = next(each for each in prompts if each in text)
        messages = [{"role": "user", "content": prompt}, *rollout.episode.messages]
        whole = str(tokenizer.apply_chat_template(messages, tokenize=False))
        # The template writes a line's end behind the last turn, and the end of a turn that was cut off.
        assert whole.startswith(text), (whole, text)
