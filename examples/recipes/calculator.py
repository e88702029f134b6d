"""Make the model and data of the recipe `calculator`: a model that forgets to carry and sometimes asks.

The task is the quickstart's, addition of two numbers from 0 to 99 with one character a token, and one thing
more: a turn that is ``[37+68]`` is answered by a calculator, ``=105;``, and the model goes on. The teacher of
the warm start asks in a third of the problems, and copies the calculator's answer. In the others it adds each
column by itself and drops every carry: ``37+68=95``. It asks a little more often where a column overflows, in
40 % of these problems and in 17 % of the others.

So the warm-started model is right where nothing carries, 30 % of the problems, or where it happened to ask. It
never carries by itself, and decodes a call nearly nowhere. As each call costs something, the best that it can
learn is to ask exactly where there is a carry.

    python examples/recipes/calculator.py --out my-calculator
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from quickstart import (
    BATCH_SIZE,
    VOCABULARY,
    Problem,
    build_model,
    build_tokenizer,
    split_problems,
    warm_start,
    write_jsonl,
)
from transcripts import Transcript, play, teacher_batch
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from grpox_environments.calculator import Calculator
from grpox_environments.configs import CalculatorConfig

CALLS = {True: 0.40, False: 0.17}  # part of the problems with and without a carry in which the teacher asks
MAX_TURNS, MAX_TURN_TOKENS = 2, 8
RECIPE = Path(__file__).parents[2] / "grpox/runfile/recipes/calculator"


def transcript(problem: Problem, calls: bool, tokenizer: PreTrainedTokenizerBase) -> Transcript:
    """Write the teacher's episode for a problem."""
    begun = Transcript(tokenizer).add(problem.prompt)
    if not calls:
        return begun.add(problem.carryless, by_model=True)
    called = begun.add(f"[{problem.a}+{problem.b}]", by_model=True).add(f"={problem.answer};")
    return called.add(problem.answer, by_model=True)


def report(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem]) -> None:
    """Print the share of problems that the model solves, greedy and sampled, and in which it calls."""
    for do_sample in (False, True):
        environments = [Calculator(CalculatorConfig()) for _ in problems]
        rows = [{"prompt": problem.prompt} for problem in problems]
        play(model, tokenizer, environments, rows, MAX_TURNS, MAX_TURN_TOKENS, do_sample)
        solved = sum(each.success for each in environments) / len(problems)
        calls = sum(each.calls > 0 for each in environments) / len(problems)
        print(f"{'sampled' if do_sample else 'greedy'}: {solved:.3f} solved, {calls:.3f} with a call")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the model and data of the recipe calculator.")
    parser.add_argument("--out", type=Path, default=RECIPE, help="folder to write into")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)  # sums over several threads come in no fixed order
    torch.manual_seed(args.seed)

    args.out.mkdir(parents=True, exist_ok=True)
    train, heldout = split_problems(args.seed)
    write_jsonl(args.out / "train.jsonl", train)
    write_jsonl(args.out / "heldout.jsonl", heldout)
    tokenizer = build_tokenizer((*VOCABULARY, "[", "]", ";"))
    tokenizer.save_pretrained(args.out / "model")

    rng = random.Random(args.seed)

    model = build_model(tokenizer)

    def loss_of(_: int) -> torch.Tensor:
        chosen = rng.choices(train, k=BATCH_SIZE)
        calls = [rng.random() < CALLS[problem.carries] for problem in chosen]
        episodes = [transcript(*each, tokenizer) for each in zip(chosen, calls, strict=True)]
        return model(**teacher_batch(episodes)).loss

    warm_start(model, loss_of)
    model.save_pretrained(args.out / "model")
    report(model, tokenizer, heldout)


if __name__ == "__main__":
    main()
