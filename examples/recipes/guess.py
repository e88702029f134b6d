"""Make the model and data of the recipe `guess`: a model that plays the guessing game and rarely listens.

A number from 0 to 31 is to be found in six guesses, each answered "higher", "lower" or "right". Every number
and every answer is one token. The teacher of the warm start has six lucky numbers, of which it draws its
guesses, whatever the answers were. Only in 15 % of its games it listens, and draws any number that is still
possible. The model learns its guesses and, as a language model does, the answers too.

So the warm-started model finds the number in a fifth of its games: in 12 % of those with lucky numbers, and in
71 % of the others. Halving the possible numbers, which it has never seen, finds the number in all.

The prompt says nothing of the number, so the held-out games are all 32 numbers, each once.

    python examples/recipes/guess.py --out my-guess
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import torch
from quickstart import BATCH_SIZE, build_model, warm_start
from tokenizers import Tokenizer, models, pre_tokenizers
from transcripts import Transcript, play, respond, teacher_batch
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from grpox_environments.configs import GuessConfig
from grpox_environments.guess import Guess

NUMBERS = range(32)
PROMPT = "guess"
VOCABULARY = ("<pad>", "<eos>", "<unk>", *map(str, NUMBERS), PROMPT, "higher", "lower", "right", "invalid")
GUESSES = 6
LUCKY = (3, 7, 11, 13, 21, 27)
LISTENS = 0.15  # part of the games in which the teacher heeds the answers
WIDTH, STEPS, LEARNING_RATE = 64, 900, 3e-3
RECIPE = Path(__file__).parents[2] / "grpox/runfile/recipes/guess"


def build_tokenizer() -> PreTrainedTokenizerBase:
    """Build a tokenizer of one token per word; decoded, words have spaces between them."""
    core = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def transcript(rng: random.Random, tokenizer: PreTrainedTokenizerBase) -> Transcript:
    """Write a game of the teacher."""
    number = rng.choice(NUMBERS)
    environment = Guess(GuessConfig())
    environment.reset({"number": number}, 0)
    game = Transcript(tokenizer).add(PROMPT)
    listens = rng.random() < LISTENS
    for _ in range(GUESSES):
        guess = str(rng.randint(environment.low, environment.high) if listens else rng.choice(LUCKY))
        game.add(guess, by_model=True)
        answer = respond(environment, guess)
        assert answer is not None
        if environment.done:
            break
        game.add(answer)
    return game


def report(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
    """Print the share of games that the model wins."""
    for do_sample in (False, True):
        numbers = [*NUMBERS] * (16 if do_sample else 1)
        environments = [Guess(GuessConfig()) for _ in numbers]
        rows = [{"prompt": PROMPT, "number": number} for number in numbers]
        play(model, tokenizer, environments, rows, GUESSES, 2, do_sample)
        found = sum(each.done for each in environments) / len(numbers)
        print(f"{'sampled' if do_sample else 'greedy'}: {found:.3f} found")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the model and data of the recipe guess.")
    parser.add_argument("--out", type=Path, default=RECIPE, help="folder to write into")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)  # sums over several threads come in no fixed order
    torch.manual_seed(args.seed)

    args.out.mkdir(parents=True, exist_ok=True)
    games = "".join(json.dumps({"prompt": PROMPT, "number": number}) + "\n" for number in NUMBERS)
    for name in ("train.jsonl", "heldout.jsonl"):
        (args.out / name).write_text(games, encoding="utf-8")
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(args.out / "model")

    rng = random.Random(args.seed)

    model = build_model(tokenizer, WIDTH)

    def loss_of(_: int) -> torch.Tensor:
        games = [transcript(rng, tokenizer) for _ in range(BATCH_SIZE)]
        return model(**teacher_batch(games, learn_all=True)).loss

    warm_start(model, loss_of, STEPS, LEARNING_RATE)
    model.save_pretrained(args.out / "model")
    report(model, tokenizer)


if __name__ == "__main__":
    main()
