"""The folder in which the reader of a page works: what the pages take as being there."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from support.docs_blocks import BLOCKS, ROOT, Block, Command, files_of, name_of

RECIPES = ROOT / "grpox" / "runfile" / "recipes"
JUDGE = "async def ask(prompt, completion):\n    return float(len(completion) < 20)\n\n\n"
"""Function that the judge of docs/rewards.md calls."""
SOURCE = """\
from datasets import Dataset


class Questions:
    def load(self):
        return Dataset.from_list([{"question": f"{n}+{n}=", "answer": 2 * n} for n in range(64)])
"""
OBSERVER = """\
class Mine:
    def grpox_run_started(self, run):
        print("started")
"""
OWN_LOSS = """\
from grpox.contracts import LossInputs, LossOutput, Reduction
from pydantic import BaseModel


class Mine:
    reduction = Reduction.TOKEN_MEAN

    class Config(BaseModel):
        clip_high: float = 0.2

    def __init__(self, config: Config) -> None:
        self.config = config

    def per_token(self, inputs: LossInputs) -> LossOutput:
        ratio = (inputs.logprobs - inputs.old_logprobs).exp()
        return LossOutput(-ratio.clamp(max=1 + self.config.clip_high) * inputs.advantages)
"""
TRL_SCRIPT = """\
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer


def reward_len(completions, **kwargs):
    return [-abs(20 - len(completion)) for completion in completions]


if __name__ == "__main__":
    rows = load_dataset("org/data", split="train")
    args = GRPOConfig(learning_rate=1e-5)
    GRPOTrainer(model="org/model", reward_funcs=reward_len, args=args, train_dataset=rows).train()
"""
TRL_YAML = "model_name_or_path: org/model\ndataset_name: org/data\nreward_funcs: [think_format_reward]\n"
HELD_OUT = (
    '{"prompt": [{"role": "user", "content": "1+1="}], "answer": "2", '
    '"task": "chain_sum", "settings": "{}", "entry": "{}"}\n'
)
OWN_FILES = {
    "docs/conformance.md": {"mine.py": OWN_LOSS.replace("class Mine", "class MyLoss")},
    "docs/data.md": {"mine.py": SOURCE},
    "docs/from-trl.md": {"train_grpo.py": TRL_SCRIPT, "grpo_config.yaml": TRL_YAML},
    "docs/own-training-parts.md": {"problems.csv": "question,answer\n1+1=,2\n"},
    "docs/run-file.md": {"my_loss.py": OWN_LOSS, "observer.py": OBSERVER},
    "plugins/examples/grpox-reasoning-gym/README.md": {
        "heldout.jsonl": HELD_OUT,
        "sums-heldout.jsonl": HELD_OUT,
    },
}
"""Files that the reader of a page has, although the page does not show them."""


def block_with(page: str, text: str) -> Block:
    """The one block of a page that holds `text`."""
    [found] = [block for block in BLOCKS if name_of(block.page) == page and text in block.text]
    return found


def executed(page: str, text: str, **given: Any) -> dict[str, Any]:
    """Execute the block of a page that holds `text`, with the names `given`, and return its names."""
    block = block_with(page, text)
    names: dict[str, Any] = {"__name__": __name__, **given}  # dataclasses look the module up
    exec(compile(block.text, block.place, "exec"), names)
    return names


def made_by(commands: Iterable[Command]) -> set[str]:
    """Return the files that these commands create."""
    words = {word for command in commands for word in command.words[:2]}
    made = {"copy": {"quickstart", "quickstart.yaml"}, "import-trl": {"run.yaml"}}
    return {name for word in words for name in made.get(word, ())}


def prepare(folder: Path, page: str, left_out: Collection[str] = ()) -> None:
    """Make in `folder` what the reader of `page` has, but for what is `left_out`."""
    for name in ("my-model", "OUT"):
        _make_model(folder / name)
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "grpox" / "runfile").mkdir(parents=True)  # as in a clone, but without the modules
    (folder / "grpox" / "runfile" / "recipes").symlink_to(RECIPES)
    for name in {"quickstart", "quickstart.yaml"}.difference(left_out):
        (folder / name).symlink_to(RECIPES / name)
    _make_data(folder)
    files = {
        "run.yaml": files_of("README.md")["run.yaml"],
        "rewards.py": block_with("docs/run-file.md", "def is_short(completions, answer").text,
        "judge.py": JUDGE + block_with("docs/rewards.md", "async def judged").text,
        **files_of(page),
        **OWN_FILES.get(page, {}),
    }
    for name, text in files.items():
        if name not in left_out:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")


def _make_model(folder: Path) -> None:
    """Make the quickstart's model with as many positions as the pages' lengths need."""
    folder.mkdir()
    for file in (RECIPES / "quickstart" / "model").iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 32768}))


def _make_data(folder: Path) -> None:
    (folder / "train.jsonl").symlink_to(RECIPES / "quickstart" / "train.jsonl")
    (folder / "held-out.jsonl").symlink_to(RECIPES / "quickstart" / "heldout.jsonl")
    rows = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(2000)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
