"""Make the quickstart's model and data: a small language model that adds, but forgets to carry.

The task is addition of two numbers from 0 to 99, one character a token: the prompt is ``37+48=`` and the
answer ``85``. The model is warm-started on a teacher who mostly forgets to carry: where a column overflows,
the teacher writes the right sum only 12 % of the time, and otherwise adds each column by itself and drops
the carry (``37+48=75``). So the model decodes the carry-less sum, which is right for the 30 % of problems in
which nothing carries, but it *samples* a right carry now and then.

That is the situation reinforcement learning is for: the right behaviour is there, rare, and a reward that
can only say right or wrong is enough to make it the rule. GRPO does not teach the model to carry from
nothing; with carries never seen, no sample of a group would be right and there would be nothing to learn.

500 problems are held out of the warm start and of ``train.jsonl``, so that the accuracy that a run reports
is about prompts the model was never shown (for most of them it was shown the mirror image, ``48+37=``).
Everything is drawn from one seed on one thread: the same versions of torch and transformers on the same kind
of machine make the same files again.

    python examples/recipes/quickstart.py --out my-quickstart
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

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

VOCABULARY = ("<pad>", "<eos>", "<unk>", *"0123456789+-*=")
NUM_HELDOUT = 500
RIGHT_CARRIES = 0.12  # how often the teacher carries: enough for RL to find, too rare to be the mode
STEPS, WARMUP_STEPS, BATCH_SIZE, LEARNING_RATE = 600, 50, 128, 2e-3
MAX_NEW_TOKENS = 4  # three digits and the EOS
RECIPE = Path(__file__).parents[2] / "grpox/runfile/recipes/quickstart"
IGNORED = -100  # transformers' label for positions without loss


class Problem(NamedTuple):
    """One ordered pair to add: 3+48 and 48+3 are two problems."""

    a: int
    b: int

    @property
    def prompt(self) -> str:
        return f"{self.a}+{self.b}="

    @property
    def answer(self) -> str:
        return str(self.a + self.b)

    @property
    def carryless(self) -> str:
        """The sum with every carry dropped: units and tens are each added modulo 10."""
        tens, units = (self.a // 10 + self.b // 10) % 10, (self.a + self.b) % 10
        return str(10 * tens + units)

    @property
    def carries(self) -> bool:
        return self.carryless != self.answer


def split_problems(seed: int) -> tuple[list[Problem], list[Problem]]:
    """Shuffle all 10,000 ordered pairs and split them into (train, held-out)."""
    problems = [Problem(a, b) for a in range(100) for b in range(100)]
    random.Random(seed).shuffle(problems)
    return problems[NUM_HELDOUT:], problems[:NUM_HELDOUT]


def build_tokenizer(vocabulary: Sequence[str] = VOCABULARY, pattern: str = ".") -> PreTrainedTokenizerBase:
    """Build a tokenizer of one token per match of a pattern, padded on the left as generation needs it."""
    core = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    core.decoder = decoders.Fuse()  # without a decoder, tokens would be joined by spaces
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def build_model(tokenizer: PreTrainedTokenizerBase, width: int = 128, **shape: int) -> LlamaForCausalLM:
    """Build a Llama with random weights, of two layers and half a million parameters if no shape is given.

    Qwen2 would not do: AutoTokenizer gives every Qwen2 folder Qwen2's own pre-tokenizer, which silently drops
    unknown characters, whatever the folder's tokenizer.json says.
    """
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    sizes = {
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": 2,
        "num_attention_heads": width // 32,
        "num_key_value_heads": width // 32,
        "max_position_embeddings": 64,
    }
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        **(sizes | shape),
        tie_word_embeddings=True,
        initializer_range=0.05,  # the usual 0.02 suits wide models; a narrow one starts faster from more
        bos_token_id=None,
        **ids,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(**ids)
    return model


def teacher_batch(
    problems: Sequence[Problem], tokenizer: PreTrainedTokenizerBase, rng: random.Random
) -> dict[str, torch.Tensor]:
    """Draw a batch of the teacher's answers; the loss is on the answer and its EOS alone.

    Labels are drawn anew each time, so that the model learns the teacher's odds, not single mistakes.
    """
    chosen = rng.choices(problems, k=BATCH_SIZE)
    labels = [p.answer if rng.random() < RIGHT_CARRIES else p.carryless for p in chosen]
    texts = [p.prompt + label + tokenizer.eos_token for p, label in zip(chosen, labels, strict=True)]
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    targets = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORED)
    for row, label in zip(targets, labels, strict=True):
        row[: -(len(label) + 1)] = IGNORED  # padding is on the left: answer and EOS are the last tokens
    # Left padding shifts the rows: positions must be counted from each row's first real token.
    positions = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    return {**batch, "position_ids": positions, "labels": targets}


def warm_start(
    model: LlamaForCausalLM,
    loss_of: Callable[[int], torch.Tensor],
    steps: int = STEPS,
    learning_rate: float = LEARNING_RATE,
    warmup_steps: int = WARMUP_STEPS,
) -> None:
    """Train the model on a teacher, in place; `loss_of` draws a batch and returns its loss, given the step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = get_linear_schedule_with_warmup(optimizer, warmup_steps, steps)
    model.train()
    for step in track(range(steps), description="warm start"):
        loss_of(step).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


@torch.inference_mode()
def solved(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem]
) -> list[bool]:
    """Return, for every problem, True if greedy decoding gives exactly the answer."""
    model.eval()
    prompts = tokenizer([p.prompt for p in problems], return_tensors="pt", padding=True)
    output = model.generate(
        input_ids=prompts["input_ids"],
        attention_mask=prompts["attention_mask"],
        max_new_tokens=MAX_NEW_TOKENS,
        do_sample=False,
    )
    texts = tokenizer.batch_decode(output[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
    return [text == problem.answer for text, problem in zip(texts, problems, strict=True)]


def write_jsonl(path: Path, problems: Sequence[Problem]) -> None:
    rows = (json.dumps({"prompt": p.prompt, "answer": p.answer}) for p in problems)
    path.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")


def report(problems: Sequence[Problem], right: Sequence[bool]) -> None:
    """Print the accuracy over all problems, and over those that carry and those that do not."""
    pairs = list(zip(problems, right, strict=True))
    carry = [ok for problem, ok in pairs if problem.carries]
    plain = [ok for problem, ok in pairs if not problem.carries]
    for label, part in (("held-out", list(right)), ("carry", carry), ("no carry", plain)):
        print(f"greedy accuracy, {label:<9}{sum(part) / len(part):.3f}  ({sum(part)} of {len(part)})")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the quickstart's model and data.")
    parser.add_argument("--out", type=Path, default=RECIPE, help="folder to write into")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)  # sums over several threads come in no fixed order
    torch.manual_seed(args.seed)

    args.out.mkdir(parents=True, exist_ok=True)
    train, heldout = split_problems(args.seed)
    write_jsonl(args.out / "train.jsonl", train)
    write_jsonl(args.out / "heldout.jsonl", heldout)
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(args.out / "model")  # before its first use: padding would be saved with it

    model = build_model(tokenizer)
    rng = random.Random(args.seed)
    warm_start(model, lambda _: model(**teacher_batch(train, tokenizer, rng)).loss)
    model.save_pretrained(args.out / "model")
    report(heldout, solved(model, tokenizer, heldout))


if __name__ == "__main__":
    main()
