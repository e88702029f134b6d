"""Prompts as text and tokens, and the data sets that hold none."""

import datasets
import pytest
from support.problems import problem_of
from transformers import GPT2Config, LlamaConfig, MambaConfig

from grpox.config import DataConfig, SamplingConfig
from grpox.data.open_data import open_data
from grpox.data.prompts import PromptLimit, PromptSet
from grpox.data.row_stream import RowStream
from grpox.errors import ConfigError, RunFailed


class Tokenizer:
    """Letters as tokens, and a chat template that writes each message as <role>content."""

    def __init__(self, chat_template="yes"):
        self.chat_template = chat_template

    def __call__(self, texts, add_special_tokens=True):
        begin = [0] if add_special_tokens else []
        return {"input_ids": [begin + [ord(letter) for letter in text] for text in texts]}

    def batch_decode(self, sequences, skip_special_tokens=False):
        return ["".join(map(chr, ids)) for ids in sequences]

    def apply_chat_template(self, messages, add_generation_prompt, tokenize, **kwargs):
        assert not tokenize
        told = "".join(f"<{m['role']}>{m['content']}" for m in messages)
        return told + ("<assistant>" if add_generation_prompt else "") + kwargs.get("end", "")


def prompts(rows, tokenizer=None, limit=None, continues=False, **template):
    dataset = datasets.Dataset.from_dict({"prompt": rows, "answer": [str(row) for row in range(len(rows))]})
    keys = DataConfig(path="x", continue_final_message=continues)
    return PromptSet(dataset, "prompt", tokenizer or Tokenizer(), template, limit, keys=keys)


def test_the_tokenizer_writes_the_special_tokens_of_texts_and_the_template_those_of_messages():
    made = prompts(["ab", "c"])
    assert made.token_ids(0) == (0, 97, 98)
    assert made.rows([1, 1, 0]) == (["c", "c", "ab"], {"answer": ["1", "1", "0"]})
    assert made.columns_of([1, 0]) == [{"answer": "1"}, {"answer": "0"}]
    made = prompts([[{"role": "user", "content": "a"}]], end="!")
    assert made.text(0) == bytes(made.token_ids(0)).decode() == "<user>a<assistant>!"


@pytest.mark.parametrize(
    ("rows", "row"), [(["a", None], 1), (["a", "b", ""], 2), ([3, 4], 0), ([["a"], ["b"]], 0), ([[], []], 0)]
)
def test_the_first_row_without_a_prompt_is_named(rows, row):
    with pytest.raises(ConfigError, match=rf"row {row} \(from 0\) of the data has no prompt"):
        prompts(rows)


@pytest.mark.parametrize("name", ["completions", "trainer_state"])
def test_a_column_that_reward_functions_would_never_see_is_refused(name):
    rows = datasets.Dataset.from_dict({"prompts": ["a"], name: ["b"]})
    problem = problem_of(PromptSet, rows, "prompts", Tokenizer(), data="the evaluation data")
    assert "the evaluation data has a column with a name that" in problem.what
    assert problem.given == name


def test_a_prompt_with_half_a_character_is_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "\\ud800"}\n')
    with pytest.raises(ConfigError, match=r"row 1 \(from 0\) of the data has half of a surrogate pair"):
        PromptSet(open_data(str(path)), "prompt", Tokenizer())


class Strict(Tokenizer):
    """Has no token for a blank, and a template that needs a role."""

    def __call__(self, texts, add_special_tokens=True):
        return {"input_ids": [[] if text == " " else [1] for text in texts]}

    def apply_chat_template(self, messages, **kwargs):
        if any(message["role"] is None for message in messages):
            raise KeyError("role")
        return super().apply_chat_template(messages, **kwargs)


MESSAGES = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("rows", "tokenizer", "text"),
    [
        ([MESSAGES], Tokenizer(chat_template=None), "no chat template"),
        ([], Tokenizer(), "the data has no row"),
        (["a", " "], Strict(), r"row 1 \(from 0\) of the data has no tokens"),
        (
            [MESSAGES, [{"content": "b", "role2": "user"}]],
            Strict(),
            r"chat template fails on row 1 \(from 0\) of the data: KeyError",
        ),
    ],
)
def test_data_that_gives_no_tokens_is_refused_at_the_start(rows, tokenizer, text):
    with pytest.raises(ConfigError, match=text):
        prompts(rows, tokenizer)


def test_the_first_prompt_that_is_too_long_is_named_before_training():
    # The tokenizer writes one special token: "abcd" has 5.
    texts = ["ab", "abcd", "abc", "abcdef"]
    problem = problem_of(prompts, texts, limit=PromptLimit(3, "data.max_prompt_length"))
    for fact in ("row 1 (from 0)", "2 more", "longest has 7 tokens"):
        assert fact in problem.what
    assert (problem.key, problem.given) == ("data.max_prompt_length", "5 tokens")
    cut = prompts(["ab", "abcd"], limit=PromptLimit(3, cut=True))
    assert [cut.token_ids(row) for row in (0, 1)] == [(0, 97, 98), (0, 99, 100)]
    assert (cut.prompt(1), cut.text(1)) == ("abcd", "abcd")  # rewards see it whole


def test_prompts_are_tokenised_once_as_far_as_memory_allows(monkeypatch):
    class Counting(Tokenizer):
        texts = 0

        def __call__(self, texts, **kwargs):
            self.texts += len(texts)
            return super().__call__(texts, **kwargs)

    monkeypatch.setattr("grpox.data.prompts.CACHED_TOKENS", 7)
    tokenizer = Counting()
    made = prompts(["ab", "cdef", "gh", "i"], tokenizer, PromptLimit(4, cut=True))
    assert tokenizer.texts == 4 + 2  # two show what the tokenizer adds
    # 3 + 4 tokens are kept; those of the third would be 10.
    assert [made.token_ids(i) for i in (0, 1)] == [(0, 97, 98), (0, 100, 101, 102)]
    assert tokenizer.texts == 6
    assert [made.token_ids(i) for i in (2, 3)] == [(0, 103, 104), (0, 105)]
    assert tokenizer.texts == 8


def stream_of(rows):
    return RowStream(datasets.IterableDataset.from_generator(lambda: iter(rows)), shuffle=False, seed=0)


def test_prompts_of_a_stream_are_checked_as_they_come():
    stream = stream_of([{"prompt": "a", "id": 7}, {"prompt": None, "id": 8}, {"prompt": "abcd", "id": 9}])
    made = PromptSet(stream, "prompt", Tokenizer(), limit=PromptLimit(3))
    stream.hold(range(3))
    made.check([0])
    assert (made.column_names, made.rows([0, 0])[1]) == (["id"], {"id": [7, 7]})
    with pytest.raises(RunFailed, match=r"row 1 \(from 0\) of the stream has no prompt") as caught:
        made.check([0, 1])
    assert "'id': 8" in str(caught.value)
    with pytest.raises(RunFailed, match=r"row 2 \(from 0\) of the stream is too long"):
        made.check([2])
    for row, told in (
        ({"prompt": ""}, r"row 0 \(from 0\) of the stream has no prompt"),
        ({"p": "a"}, "no such column"),
    ):
        with pytest.raises(ConfigError, match=told):
            PromptSet(stream_of([row]), "prompt", Tokenizer())


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_files_of_every_format_read_alike(tmp_path, suffix):
    path = str(tmp_path / f"data.{suffix}")
    dataset = datasets.Dataset.from_dict({"prompt": ["a", "b"], "answer": ["1", "x"]})
    {"jsonl": dataset.to_json, "csv": dataset.to_csv, "parquet": dataset.to_parquet}[suffix](path)
    assert list(open_data(path)) == dataset.to_list()


def test_the_question_is_the_last_message_of_the_user_or_the_plain_prompt():
    turns = [("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    messages = [{"role": role, "content": text} for role, text in turns]
    assert prompts([messages], continues=True).questions([0]) == ["c"]
    assert prompts([messages[:1]]).questions([0]) == [""]
    assert prompts(["abc"]).questions([0]) == ["abc"]


def limit_of(model, completion=16, **data):
    sampling = SamplingConfig(max_completion_length=completion)
    return PromptLimit.of_run(DataConfig(path="x", **data), sampling, model)


LLAMA = LlamaConfig(max_position_embeddings=64)


@pytest.mark.parametrize(
    ("model", "data", "tokens", "cut"),
    [
        (LLAMA, {}, 48, False),
        (GPT2Config(n_positions=32), {}, 16, False),
        (LLAMA, {"max_prompt_length": 10}, 10, False),
        (LLAMA, {"max_prompt_length": 1000, "long_prompts": "cut"}, 48, True),
        (MambaConfig(), {}, None, False),  # any length
        (MambaConfig(), {"max_prompt_length": 5}, 5, False),
        (LlamaConfig(max_position_embeddings=17), {}, 1, False),
    ],
)
def test_the_smaller_of_the_key_and_the_positions_that_a_completion_leaves_is_the_limit(
    model, data, tokens, cut
):
    made = limit_of(model, **data)
    assert (made.tokens, made.cut) == (tokens, cut)
    if tokens == 48:
        for fact in ("64 positions of the model", "sampling.max_completion_length 16"):
            assert fact in made.origin
    if data and tokens == data["max_prompt_length"]:
        assert made.origin == "data.max_prompt_length"
    assert made.refuses((tokens or 10**6) + 1) == (tokens is not None and not cut)
    assert not made.refuses(tokens or 10**6)


def test_a_completion_that_fills_the_positions_is_refused():
    problem = problem_of(limit_of, LlamaConfig(max_position_embeddings=16))
    assert problem.key == "sampling.max_completion_length"
    assert "leaves no room for a prompt: the model has 16 positions" in problem.what
