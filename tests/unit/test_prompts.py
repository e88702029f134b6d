"""Prompts as text and tokens, and the data sets that hold none."""

import datasets
import pytest

from grpox.errors import ConfigError
from grpox.prompts import PromptSet, load_file


class Tokenizer:
    """Letters as tokens, and a chat template that writes each message as <role>content."""

    def __init__(self, chat_template="yes"):
        self.chat_template = chat_template

    def __call__(self, text, add_special_tokens=True):
        begin = [0] if add_special_tokens else []
        return {"input_ids": begin + [ord(letter) for letter in text]}

    def decode(self, ids, skip_special_tokens=False):
        return "".join(map(chr, ids))

    def apply_chat_template(self, messages, add_generation_prompt, tokenize, **kwargs):
        assert not tokenize
        told = "".join(f"<{m['role']}>{m['content']}" for m in messages)
        return told + ("<assistant>" if add_generation_prompt else "") + kwargs.get("end", "")


def prompts(rows, tokenizer=None, **template):
    dataset = datasets.Dataset.from_dict({"prompt": rows, "answer": ["x"] * len(rows)})
    return PromptSet(dataset, "prompt", tokenizer or Tokenizer(), template)


def test_plain_prompts_get_the_special_tokens_of_the_tokenizer():
    made = prompts(["ab", "c"])
    assert made.token_ids(0) == (0, 97, 98)
    assert made.completion([97]) == "a"
    assert made.columns([1, 1, 0]) == {"answer": ["x"] * 3}


def test_the_chat_template_writes_the_special_tokens_of_messages():
    made = prompts([[{"role": "user", "content": "a"}]], end="!")
    assert made.text(0) == "<user>a<assistant>!"
    assert bytes(made.token_ids(0)).decode() == "<user>a<assistant>!"
    assert made.completion([97]) == [{"role": "assistant", "content": "a"}]


@pytest.mark.parametrize(
    ("rows", "row"), [(["a", None], 1), (["a", "b", ""], 2), ([3, 4], 0), ([["a"], ["b"]], 0), ([[], []], 0)]
)
def test_the_first_row_without_a_prompt_is_named(rows, row):
    with pytest.raises(ConfigError, match=rf"row {row} \(from 0\) holds no prompt"):
        prompts(rows)


def test_messages_need_a_chat_template():
    with pytest.raises(ConfigError, match="no chat template"):
        prompts([[{"role": "user", "content": "a"}]], Tokenizer(chat_template=None))


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_files_of_every_format_read_alike(tmp_path, suffix):
    path = str(tmp_path / f"data.{suffix}")
    dataset = datasets.Dataset.from_dict({"prompt": ["a", "b"], "answer": ["1", "x"]})
    {"jsonl": dataset.to_json, "csv": dataset.to_csv, "parquet": dataset.to_parquet}[suffix](path)
    assert load_file(path).to_list() == dataset.to_list()
