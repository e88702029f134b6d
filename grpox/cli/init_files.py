"""The files of `grpox init`, and the checks of its answers, which are those of `grpox validate`."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from grpox.config import ModelConfig
from grpox.data.chat import is_unrendered
from grpox.data.open_data import DATA_FILES
from grpox.errors import ConfigError, nearest
from grpox.runfile.data_files import first_value, look_at
from grpox.runfile.load import load_run, resolve_config
from grpox.runfile.model_options import positions_of, template_of
from grpox.runfile.paths import input_path
from grpox.runfile.yaml_lines import inline, read_yaml
from grpox.runtime.files import write_atomically, write_error_message

EXAMPLE, OWN = "example", "own"
"""Answers: write an example of data; write a reward function."""
ANSWERS = ("answer", "solution", "label", "target", "ground_truth", "completion")
"""Usual names of the column with the right answer."""
_OTHERS = {"model": {"path": "org/model"}, "data": {"path": "org/data"}, "rewards": ["exact"]}
"""Stands for answers that are not there yet; problems with them are not told."""
_KEYS = {"model": "model", "data": "data.path", "prompt_column": "data", "reward": "rewards"}
"""Answer -> beginning of the keys whose problems are its own."""
RUN_FILE = """\
# A run file: `grpox validate {name}` checks it, `grpox train {name}` trains.
# docs/run-file.md explains every key; those left out have a default.

# Paths of inputs are relative to this file.
model:
  path: {model}

data:
  path: {data}  # one prompt a row; rewards get the other columns
{prompt_column}
# Each reward scores every completion; the sum of score * weight counts.
rewards:
  - {reward}

# hf samples with transformers and needs nothing else; vllm-colocate is faster on a GPU.
generator: hf

# The policy loss: dapo, grpo, dr_grpo, cispo, sapo, ... (grpox plugins list --kind loss)
loss: dapo

train:
  max_steps: 100
  # A step trains on per_device_train_batch_size * gradient_accumulation_steps completions on each rank,
  # here 4 prompts with 8 completions each, which are compared with each other.
  per_device_train_batch_size: 8
  gradient_accumulation_steps: 4
  num_generations: 8
  learning_rate: 1.0e-6

sampling:
  max_completion_length: {tokens}  # tokens; longer completions are cut
  temperature: 1.0

# Held-out prompts, evaluated before and after training, and every so many steps:
# evaluation: {{path: held-out.jsonl, every: 20}}

# A checkpoint every so many steps, to go on after an interruption:
# checkpoint: {{every: 20}}

# Outputs are relative to the folder in which you start the run.
output_dir: {output}
"""

REWARDS = '''\
"""Rewards: each function takes N completions and returns N numbers."""


def reward(completions, **columns):
    """{summary}

    Every column of the data is in `columns`, or can be a parameter: a list with one entry for each completion.
    """
    return [{score}]


def text(completion):
    """The text of a completion, which is a list of messages where the prompts are."""
    return completion if isinstance(completion, str) else completion[-1]["content"]
'''


@dataclass
class RunDraft:
    """A run as far as it is known."""

    folder: Path
    model: str = ""
    data: str = ""
    prompt_column: str = "prompt"
    answer_column: str = ""
    """Column with the right answer; empty if there is none."""
    reward: str = ""
    chat: str = ""
    """Answer to `is_plain`, yes or no; empty if it was not asked."""

    @property
    def run_file(self) -> Path:
        """Path of the run file."""
        return self.folder / "run.yaml"

    @property
    def columns(self) -> Sequence[str]:
        """Columns of the data; empty for those on a hub."""
        path = Path(self._input(self.data, DATA_FILES))
        return ["prompt", "answer"] if self.data == EXAMPLE else look_at(path).columns if path.is_file() else []

    @property
    def is_plain(self) -> bool:
        """True if the model has a chat template, which the prompts as plain text would not get."""
        path = Path(self._input(self.data, DATA_FILES))
        first = "a" if self.data == EXAMPLE else first_value(path, self.prompt_column)
        return is_unrendered(first, template_of(ModelConfig(path=self._input(self.model))))

    def refuse_existing(self, name: str, use: str = "") -> None:
        """Refuse to overwrite a file; raises ConfigError if it exists. `use` is an answer that uses it."""
        path = self.folder / name
        if path.exists():
            allowed = f"{f'{use}, to use it, or ' if use else ''}another folder: grpox init FOLDER"
            raise ConfigError("exists already", given=str(path), allowed=allowed)

    def set(self, name: str, given: str) -> None:
        """Set the answer of that name, as the fields are named, and check it.

        Raises:
            ConfigError: it is wrong.
        """
        setattr(self, name, given)
        if name == "chat" and given not in ("yes", "no"):
            raise ConfigError("is not yes or no", given=given)
        columns = self.columns if name == "answer_column" else ()
        if columns and given and given not in columns:
            near, allowed = nearest(given, columns), ", ".join(columns)
            raise ConfigError("no such column", "--answer-column", given=given, allowed=allowed, nearest=near)
        if (name, given) == ("data", EXAMPLE):
            return self.refuse_existing("sums.jsonl", str(self.folder / "sums.jsonl"))
        if (name, given) == ("reward", OWN):
            return self.refuse_existing("rewards.py", f"{self.folder / 'rewards.py'}:FUNCTION")
        if name not in _KEYS:
            return None
        run = dict(_OTHERS)
        if name == "model":
            run["model"] = {"path": self._input(given)}
        elif self.data != EXAMPLE:
            run["data"] = {"path": self._input(self.data, DATA_FILES), "prompt_column": self.prompt_column}
        if name == "reward" and given != OWN:
            run["rewards"] = [self._entry(given, self._input)]
        try:
            resolve_config(run, Path.cwd(), "grpox init")
        except ConfigError as error:
            if problems := [each for each in error.problems if each.key.startswith(_KEYS[name])]:
                raise ConfigError(problems) from error
        return None

    def write(self) -> list[Path]:
        """Write the files; none remains if the run file is not right.

        Returns:
            their paths.

        Raises:
            ConfigError: the answers do not fit together, or a file cannot be written.
        """
        texts = {self.run_file: self._run_text()}
        if self.reward == OWN:
            texts[self.folder / "rewards.py"] = self._reward_text()
        if self.data == EXAMPLE:
            pairs = product(range(10, 90, 5), range(3, 99, 12))
            rows = ({"prompt": f"What is {a} + {b}?", "answer": a + b} for a, b in pairs)
            texts[self.folder / "sums.jsonl"] = "".join(json.dumps(row) + "\n" for row in rows)
        try:
            for path, text in reversed(texts.items()):
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(path, text)
            load_run(str(self.run_file))
        except (OSError, ConfigError) as error:
            for path in texts:
                with suppress(OSError):
                    path.unlink()
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(write_error_message(error, self.folder), given=str(self.folder)) from error
        return list(texts)

    def _run_text(self) -> str:
        column = f"  prompt_column: {inline(self.prompt_column)}\n" if self.prompt_column != "prompt" else ""
        column += f"  chat: {'true' if self.chat == 'yes' else 'false'}\n" if self.chat else ""
        data = "sums.jsonl" if self.data == EXAMPLE else self._beside(self.data, DATA_FILES)
        given = "rewards.py:reward" if self.reward == OWN else self.reward
        entry = {"path": given} if self.reward == OWN else self._entry(given, self._beside)
        positions = positions_of(Path(self._input(self.model)), {}) or 512
        return RUN_FILE.format(
            name=self.run_file.name,
            model=inline(self._beside(self.model)),
            data=inline(data),
            prompt_column=column,
            reward=inline(entry),
            tokens=min(256, positions // 2),  # so that prompts fit too
            output=inline(f"runs/{self.folder.absolute().name or 'first'}"),
        )

    def _reward_text(self) -> str:
        if self.answer_column:
            answers = f"columns[{json.dumps(self.answer_column, ensure_ascii=False)}]"
            score = (
                f"float(str(right) in text(completion)) for completion, right in zip(completions, {answers})"
            )
            summary = "1 where the completion has the right answer in it, else 0: change it to what you want."
        else:
            score = "-abs(len(text(completion)) - 100) / 100 for completion in completions"
            summary = "The nearer to 100 characters, the better: change it to what you want."
        return REWARDS.format(score=score, summary=summary)

    def _entry(self, given: str, path_of: Any) -> Any:
        """Return an entry of `rewards`: a mapping as given, a function in a file, or a name."""
        if given.startswith("{"):
            return read_yaml(given, "--reward").data
        file, colon, name = given.rpartition(":")
        if colon and file.endswith(".py"):
            return {"path": f"{path_of(file, ('.py',))}:{name}"}
        takes_answer = given.rpartition(":")[2] in ("exact", "math") and self.answer_column not in (
            "",
            "answer",
        )
        return {"name": given, "column": self.answer_column} if takes_answer else {"name": given}

    def _input(self, given: str, suffixes: Sequence[str] = ()) -> str:
        return input_path(given, Path.cwd(), suffixes)

    def _beside(self, given: str, suffixes: Sequence[str] = ()) -> str:
        """Return a path as the run file in its folder has to name it; a hub id is unchanged."""
        path = self._input(given, suffixes)
        if not Path(path).is_absolute():
            return path
        relative = os.path.relpath(path, self.folder.resolve())
        if relative.startswith("../.."):  # a place of its own, not one beside the run
            return path
        return relative if "/" in relative or suffixes else f"./{relative}"
