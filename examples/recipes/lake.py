"""Make the model and data of the recipe lake: a small language model that walks straight, into the holes.

The task is the built-in environment ``lake``: maps of 4 x 4 cells with four holes, on which the goal is at
least four moves away, and one move a turn. The model is warm-started on a teacher who walks towards the goal
and overlooks the holes, except that in 30 % of its turns it takes a shortest safe way. So the model decodes a
straight walk, and falls where a hole lies in it, but it samples a way round now and then. Reinforcement
learning makes that the rule.

Held-out maps are in neither the warm start nor ``train.jsonl``. Everything is drawn from one seed on one
thread: the same versions of torch and transformers on the same kind of machine make the same files again.

    python examples/recipes/lake.py --out my-lake
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from quickstart import build_model, build_tokenizer, warm_start
from transcripts import play
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from grpox_environments.configs import LakeConfig
from grpox_environments.lake import HOLE, MOVES, PLAYER, Cell, Lake, distances, draw_map, find, moved

PROMPT = "lake\n"
VOCABULARY = ("<pad>", "<eos>", "<unk>", "lake", *MOVES, "@", ".", "O", "G", "#", "\n")
SIZE, HOLES, DISTANCE = 4, 4, 4
NUM_TRAIN, NUM_HELDOUT = 6000, 300
SAFE_TURNS = 0.3  # how often the teacher looks at the holes: enough for RL to find, too rare to be the mode
MOST_TURNS, TEACHER_TURNS = 10, 4
WIDTH, SHAPE = 64, {"intermediate_size": 192, "num_hidden_layers": 3, "max_position_embeddings": 512}
STEPS, SINGLE_STEPS, WARMUP_STEPS, BATCH_SIZE, LEARNING_RATE = 600, 450, 40, 64, 3e-3
CONFIG = LakeConfig(look=True, hint="")
RECIPE = Path(__file__).parents[2] / "grpox/runfile/recipes/lake"


def split_maps(seed: int) -> tuple[list[str], list[str]]:
    """Draw distinct maps and split them into (train, held-out)."""
    rng = random.Random(seed)
    maps: dict[str, None] = {}
    while len(maps) < NUM_TRAIN + NUM_HELDOUT:
        rows = draw_map(SIZE, HOLES / SIZE**2, rng.getrandbits(32))
        if distances(rows)[find(rows, PLAYER)] >= DISTANCE:
            maps["/".join(rows)] = None
    drawn = list(maps)
    return drawn[:NUM_TRAIN], drawn[NUM_TRAIN:]


def straight(rows: Sequence[str], player: Cell) -> list[str]:
    """List the directions that lead nearer to the goal as if there were no holes."""
    plain = [line.replace(HOLE, ".") for line in rows]
    return nearer(plain, player)


def nearer(rows: Sequence[str], player: Cell) -> list[str]:
    """List the directions of shortest ways to the goal."""
    left = distances(rows)
    return [way for way in MOVES if left.get(moved(rows, player, way), 99) < left[player]]


def teacher_odds(rows: Sequence[str], player: Cell) -> list[float]:
    """Return the probability with which the teacher takes each direction."""
    safe, plain = nearer(rows, player), straight(rows, player)
    return [
        SAFE_TURNS * (way in safe) / len(safe) + (1 - SAFE_TURNS) * (way in plain) / len(plain) for way in MOVES
    ]


def teacher_episode(text: str, turns: int, rng: random.Random) -> tuple[str, list[list[float]]]:
    """Write an episode of the teacher, from any safe cell of a map.

    Returns:
        the views, each with a move and its EOS behind it; the odds of each move.
    """
    lake = Lake(CONFIG)
    lake.reset({"map": text}, 0)
    lake.player = rng.choice([cell for cell, left in distances(lake.rows).items() if left])
    episode, odds, view = PROMPT, [], lake.view()
    for _ in range(turns):
        odds.append(teacher_odds(lake.rows, lake.player))
        [move] = rng.choices(list(MOVES), odds[-1])
        episode += f"{view}{move}<eos>"
        answer = lake.reply(move)
        if answer is None:
            break
        view = answer
    return episode, odds


def teacher_loss(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    episodes: Sequence[tuple[str, list[list[float]]]],
) -> torch.Tensor:
    """Return the cross-entropy to the teacher's odds, and that of the EOS after each move.

    Odds instead of drawn moves as targets leave out the noise of the draws, which hides what holes change.
    """
    texts = [text for text, _ in episodes]
    batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right")
    following = batch["input_ids"][:, 1:]
    moves = torch.tensor(tokenizer.convert_tokens_to_ids(list(MOVES)))
    is_move, is_end = torch.isin(following, moves), following == tokenizer.eos_token_id
    targets = torch.nn.functional.one_hot(following, len(tokenizer)).float()
    odds = torch.zeros(int(is_move.sum()), len(tokenizer))
    odds[:, moves] = torch.tensor([each for _, of_episode in episodes for each in of_episode])
    targets[is_move] = odds
    losses = -(targets * model(**batch).logits[:, :-1].log_softmax(-1)).sum(-1)
    return losses[is_move | is_end].mean()


def report(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, maps: Sequence[str]) -> None:
    """Print the share of maps that the model crosses."""
    for do_sample in (False, True):
        lakes = [Lake(CONFIG) for _ in maps]
        play(model, tokenizer, lakes, rows_of(maps), MOST_TURNS, 2, do_sample)
        crossed = sum(lake.reward() for lake in lakes) / len(maps)
        print(f"{'sampled' if do_sample else 'greedy'}: {crossed:.3f} crossed")


def rows_of(maps: Sequence[str]) -> list[dict[str, str]]:
    return [{"prompt": PROMPT, "map": text} for text in maps]


def write_jsonl(path: Path, maps: Sequence[str]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows_of(maps)), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the model and data of the recipe lake.")
    parser.add_argument("--out", type=Path, default=RECIPE, help="folder to write into")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)  # sums over several threads come in no fixed order
    torch.manual_seed(args.seed)

    args.out.mkdir(parents=True, exist_ok=True)
    train, heldout = split_maps(args.seed)
    write_jsonl(args.out / "train.jsonl", train)
    write_jsonl(args.out / "heldout.jsonl", heldout)
    tokenizer = build_tokenizer(VOCABULARY, "|".join(["lake", *MOVES, r"[\s\S]"]))
    tokenizer.save_pretrained(args.out / "model")  # before its first use: padding would be saved with it

    model = build_model(tokenizer, WIDTH, **SHAPE)
    rng = random.Random(args.seed)

    def loss_of(step: int) -> torch.Tensor:
        turns = 1 if step < SINGLE_STEPS else TEACHER_TURNS
        episodes = [teacher_episode(text, turns, rng) for text in rng.choices(train, k=BATCH_SIZE)]
        return teacher_loss(model, tokenizer, episodes)

    warm_start(model, loss_of, STEPS, LEARNING_RATE, WARMUP_STEPS)
    model.save_pretrained(args.out / "model")
    report(model, tokenizer, heldout)


if __name__ == "__main__":
    main()
