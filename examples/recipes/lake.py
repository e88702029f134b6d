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
from rich.progress import track
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    get_linear_schedule_with_warmup,
)

from grpox_environments.configs import LakeConfig
from grpox_environments.lake import HOLE, MOVES, PLAYER, Cell, Lake, distances, draw_map, find, moved

PROMPT = "lake\n"
VOCABULARY = ("<pad>", "<eos>", "<unk>", "lake", *MOVES, "@", ".", "O", "G", "#", "\n")
SIZE, HOLES, DISTANCE = 4, 4, 4
NUM_TRAIN, NUM_HELDOUT = 6000, 300
SAFE_TURNS = 0.3  # how often the teacher looks at the holes: enough for RL to find, too rare to be the mode
MOST_TURNS, TEACHER_TURNS = 10, 4
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


def build_tokenizer() -> PreTrainedTokenizerBase:
    """Build a tokenizer of one token per direction and per other character, padded on the left."""
    core = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token="<unk>"))
    words = "|".join(["lake", *MOVES])
    core.pre_tokenizer = pre_tokenizers.Split(Regex(rf"{words}|[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()  # without a decoder, tokens would be joined by spaces
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def build_model(tokenizer: PreTrainedTokenizerBase) -> LlamaForCausalLM:
    """Build a small Llama with random weights."""
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.05,  # the usual 0.02 suits wide models; a narrow one starts faster from more
        bos_token_id=None,
        **ids,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(**ids)
    return model


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


def warm_start(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, maps: Sequence[str], seed: int
) -> None:
    """Train the model on the careless teacher, in place: first on single turns, then on episodes of several."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = get_linear_schedule_with_warmup(optimizer, WARMUP_STEPS, STEPS)
    model.train()
    for step in track(range(STEPS), description="warm start"):
        turns = 1 if step < SINGLE_STEPS else TEACHER_TURNS
        episodes = [teacher_episode(text, turns, rng) for text in rng.choices(maps, k=BATCH_SIZE)]
        loss = teacher_loss(model, tokenizer, episodes)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


@torch.inference_mode()
def play(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, maps: Sequence[str], do_sample: bool = False
) -> list[tuple[Lake, list[str]]]:
    """Play an episode on each map; return its environment at the end, and the states of its turns."""
    model.eval()
    lakes = [Lake(CONFIG) for _ in maps]
    texts = [PROMPT + lake.reset({"map": text}, 0) for lake, text in zip(lakes, maps, strict=True)]
    ids = {n: tokenizer(text)["input_ids"] for n, text in enumerate(texts)}
    states: list[list[str]] = [[] for _ in maps]
    for _ in range(MOST_TURNS):
        if not ids:
            break
        # Open episodes have equal lengths: each turn is a move and an EOS, and all views have the same size.
        logits = model(input_ids=torch.tensor(list(ids.values()))).logits[:, -1]
        moves = torch.multinomial(logits.softmax(-1), 1)[:, 0] if do_sample else logits.argmax(-1)
        for n, move in zip(list(ids), moves.tolist(), strict=True):
            states[n].append(lakes[n].state_key())
            view = lakes[n].reply(tokenizer.decode([move]))
            if view is None:
                del ids[n]
            else:
                ids[n] += [move, tokenizer.eos_token_id, *tokenizer(view)["input_ids"]]
    return list(zip(lakes, states, strict=True))


def write_jsonl(path: Path, maps: Sequence[str]) -> None:
    rows = (json.dumps({"prompt": PROMPT, "map": text}) for text in maps)
    path.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")


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
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(args.out / "model")  # before its first use: padding would be saved with it

    model = build_model(tokenizer)
    warm_start(model, tokenizer, train, args.seed)
    model.save_pretrained(args.out / "model")
    for do_sample in (False, True):
        crossed = [lake.reward() for lake, _ in play(model, tokenizer, heldout, do_sample)]
        print(f"{'sampled' if do_sample else 'greedy'}: {sum(crossed) / len(crossed):.3f} crossed")


if __name__ == "__main__":
    main()
