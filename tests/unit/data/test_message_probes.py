"""Conversations of each form that data sets have, and of tools: written whole, or refused with a cure."""

import importlib.util
import json
from functools import partial
from pathlib import Path

import datasets
import pytest
from support.chat_templates import CHATML, GEMMA, LLAMA3, QWEN2_5, byte_tokenizer
from support.problems import problem_of

from grpox.config import DataConfig
from grpox.data.chat import ChatTemplate
from grpox.data.open_data import open_data
from grpox.data.prompts import PromptSet
from grpox.errors import ConfigError, RunFailed

Q = "What is 2 + 2?"
USER = {"role": "user", "content": Q}
CALL = {"id": "callofone", "type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
ANSWER = {"role": "tool", "tool_call_id": "callofone", "name": "weather", "content": '{"t": "22 C"}'}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def called(content):
    return [USER, {"role": "assistant", "content": content, "tool_calls": [CALL]}, ANSWER, USER]


SHAPES = {
    "p": ([USER], [Q]),
    "s": ([{"role": "system", "content": "Be brief."}, USER], ["Be brief.", Q]),
    "P": (
        [{"role": "user", "content": [{"type": "text", "text": text} for text in ("What is ", "2?")]}],
        ["2?"],
    ),
    "f": ([{"from": "human", "value": Q}], [Q]),
    "n": ([{"role": "user", "content": None}], ["?"]),
    "h": ([{"role": "human", "content": Q}], [Q]),
    "d": ([{"role": "developer", "content": "Be brief."}, USER], ["Be brief.", Q]),
    "t": (called(None), ["weather", "22 C"]),
    "e": (called(""), ["weather", "22 C"]),
    "r": ([USER, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nFour."}, USER], ["Four."]),
    "w": ([{"role": "user", "content": "\n \"a\" 'b' \\ <x> & é\n\n c \n"}], ["\"a\" 'b' \\ <x> & é\n\n c"]),
}
"""Letter -> messages, and texts that the model has to read."""
ACCEPTED = {
    "llama3": "psPhdrw",
    "llama3_2": "psPhdterw",
    "qwen2_5": "psPterw",
    "gemma": "pPrw",
    "gemma3": "psPrw",
    "deepseek_r1_distill": "psPrw",
    "gptoss": "psPdterw",
}
"""Public template -> shapes that it writes whole."""


def public(name):
    folder = Path(importlib.util.find_spec("trl").submodule_search_locations[0])
    return (folder / "chat_templates" / f"{name}.jinja").read_text()


CONTINUES = DataConfig(path="x", continue_final_message=True)


def prompts(template, *rows, data=datasets.Dataset.from_list, **settings):
    rows = [row if isinstance(row, dict) else {"prompt": row} for row in rows]
    return PromptSet(data(rows), "prompt", byte_tokenizer(template), **settings)


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_conversation_is_written_whole_or_refused(name):
    template, accepted, refused = public(name), "", []
    for letter, (messages, words) in SHAPES.items():
        try:
            text = prompts(template, messages).text(0)
        except ConfigError as error:
            refused.append(error.problems[0])
            continue
        accepted += letter
        assert all(word in text or json.dumps(word)[1:-1] in text for word in words), (letter, text)
        assert "None" not in text
        assert "'type': 'text'" not in text
    assert accepted == ACCEPTED[name]
    assert all("row 0 (from 0)" in problem.what and problem.allowed for problem in refused)


@pytest.mark.parametrize(
    ("messages", "cure"),
    [
        ([{"from": "human", "value": Q}], "role instead of from; content instead of value; the role user"),
        (
            [{"role": None, "from": "human", "value": Q}],
            "role instead of from; content instead of value; the role",
        ),
        ([{"role": "user", "text": Q}], "content instead of text"),
        ([{"role": "User", "content": Q}], "the role user instead of User"),
        ([{"role": "developer", "content": "x"}, USER], "the role system instead of developer"),
        ([{"role": "gpt", "content": "x"}, USER], "the role assistant instead of gpt"),
        ([{"role": "user", "content": []}], "a text as content"),
        ([{"content": Q}], "messages with a role"),
        ([{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}], "a text as content"),
        ([USER, {"role": "user", "content": 42}], "a text as content"),
    ],
)
def test_the_cure_names_known_aliases(messages, cure):
    problem = problem_of(
        prompts,
        QWEN2_5,
        [USER],
        messages,
        data=partial(datasets.Dataset.from_list, on_mixed_types="use_json"),
    )
    assert "row 1 (from 0)" in problem.what
    assert cure in problem.allowed
    assert problem.key == "data.prompt_column"


def test_a_text_is_looked_for_row_by_row():
    template = CHATML.replace("+ message.content", "+ ('' if 'secret' in message.content else message.content)")
    assert template != CHATML
    assert prompts(template, [USER]).text(0)
    problem = problem_of(prompts, template, [USER], [{"role": "user", "content": "a secret"}])
    assert "message 0 (from 0)" in problem.what


def test_a_template_that_has_parts_or_keys_of_its_own_is_left_to_it():
    own = "{% for m in messages %}<{{ m.from }}>{{ m.value }}{% endfor %}"
    assert prompts(own, [{"from": "human", "value": Q}]).text(0) == f"<human>{Q}"
    parts = "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}"
    assert prompts(parts, SHAPES["P"][0]).text(0) == "[What is ][2?]"
    assert prompts(parts, SHAPES["P"][0]).questions([0]) == ["What is 2?"]


def test_what_an_environment_answers_at_reset_is_looked_for_too():
    made = prompts(QWEN2_5, [USER])
    assert made.extended_ids(0, "And 3?")
    with pytest.raises(RunFailed, match="does not write message 1"):
        made.extended_ids(0, [{"role": "developer", "content": "Be brief."}])


BEGUN = [USER, {"role": "assistant", "content": "Let me think.\n<think>"}]


@pytest.mark.parametrize("last", [BEGUN[1], {"role": "gpt", "content": "4"}, CALL | {"role": "assistant"}])
def test_a_row_that_ends_with_the_answer_is_refused_with_the_key(last):
    problem = problem_of(prompts, LLAMA3, [USER], [USER, last])
    assert "row 1 (from 0)" in problem.what
    assert "data.continue_final_message: true" in problem.allowed


@pytest.mark.parametrize("name", ["llama3", "qwen2_5", "qwen3", "gemma3", "phi3"])
def test_a_beginning_is_continued_as_transformers_does(name):
    tokenizer = byte_tokenizer(public(name))
    made = prompts(public(name), BEGUN, [USER], keys=CONTINUES)
    own = tokenizer.apply_chat_template(BEGUN, continue_final_message=True, tokenize=False)
    assert made.text(0) == made.prompt_texts([made.token_ids(0)])[0] == own
    assert own.endswith("Let me think.\n<think>")
    assert made.text(1) == ChatTemplate(tokenizer).render([USER])
    begun = [USER, {"role": "assistant", "content": "Let me"}]
    parts = [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in begun]
    of_texts, of_parts = (prompts(public(name), each, keys=CONTINUES).text(0) for each in (begun, parts))
    assert of_parts == of_texts


@pytest.mark.parametrize("name", ["llama3_1", "qwen3", "gptoss"])
def test_nulls_that_arrow_adds_are_left_out_and_those_of_arguments_stay(tmp_path, name):
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris", "day": None}}}
    row = {"prompt": [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, ANSWER, USER]}
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    datasets.Dataset.from_list([row]).to_parquet(tmp_path / "a.parquet")
    of_json, of_arrow = (
        PromptSet(open_data(str(tmp_path / f"a.{suffix}")), "prompt", byte_tokenizer(public(name)))
        for suffix in ("jsonl", "parquet")
    )
    assert of_arrow.prompt(0)[0]["tool_calls"] is None
    assert of_arrow.text(0) == of_json.text(0)
    assert "day" in of_arrow.text(0)


@pytest.mark.parametrize("as_json", [False, True])
def test_the_columns_of_a_row_reach_its_template(as_json):
    written = json.dumps if as_json else lambda value: value
    kwargs = written({"enable_thinking": False})
    row = {"prompt": [USER], "tools": written([TOOL]), "chat_template_kwargs": kwargs}
    made = prompts(public("qwen3"), row, {"prompt": [USER], "tools": None, "chat_template_kwargs": None})
    own = byte_tokenizer(public("qwen3")).apply_chat_template(
        [USER], tools=[TOOL], enable_thinking=False, add_generation_prompt=True, tokenize=False
    )
    assert made.text(0) == made.prompt_texts([made.token_ids(0)])[0] == own
    assert "weather" not in made.text(1)
    assert made.rows([0])[1]["tools"] == [row["tools"]]


def test_columns_of_another_kind_or_beside_an_environment_are_refused():
    problem = problem_of(prompts, QWEN2_5, {"prompt": [USER], "tools": "a hammer"})
    assert "column tools" in problem.what
    assert problem.allowed.endswith("another name for the column")
    assert problem_of(prompts, QWEN2_5, {"prompt": [USER], "tools": []}, has_episodes=True).given == "tools"


def test_the_template_of_a_row_writes_its_own_special_tokens():
    row = {"prompt": [USER], "chat_template_kwargs": json.dumps({"chat_template": public("qwen2_5")})}
    assert prompts(public("llama3"), row).token_ids(0) == prompts(public("qwen2_5"), [USER]).token_ids(0)


def test_each_row_lists_its_own_tools():
    made = prompts(QWEN2_5, [USER], [USER], tools_of=lambda _: lambda row: [TOOL] if row else None)
    without = prompts(QWEN2_5, [USER])
    assert made.text(0) == without.text(0)
    assert made.token_ids(0) == without.token_ids(0)
    assert json.dumps(TOOL) in made.text(1)
    assert made.token_ids(1) == tuple(byte_tokenizer()(made.text(1))["input_ids"])
    assert (made.tools(0), made.tools(1)) == ((), [TOOL])
    plain = prompts(None, "7+8=", tools_of=lambda _: lambda row: [TOOL])
    assert (plain.token_ids(0), plain.tools(0)) == (prompts(None, "7+8=").token_ids(0), [TOOL])


def test_a_template_without_tools_gets_them_in_the_message_of_the_system_or_else_before_the_first():
    chat, system = ChatTemplate(byte_tokenizer(CHATML)), SHAPES["s"][0]
    assert not chat.lists_tools
    begin, text = chat.render(system, [TOOL]).split("\n", 1)
    assert begin == "<|im_start|>system"
    assert text.startswith("Be brief.\n\nYou can call these tools.")
    assert f"<tools>\n{json.dumps(TOOL)}\n</tools>" in text
    assert '<tool_call>\n{"name": ' in text
    alone = chat.render([USER], [TOOL])
    assert alone.startswith("<|im_start|>system\nYou can call these tools.")
    assert alone.endswith(f"<|im_start|>user\n{Q}<|im_end|>\n<|im_start|>assistant\n")
    text = ChatTemplate(byte_tokenizer(GEMMA)).render([USER], [TOOL])
    assert text.startswith("<s><|im_start|>user\nYou can call these tools.")
    assert text.endswith(f"</tool_call>\n\n{Q}<|im_end|>\n<|im_start|>model\n")
    tokenizer = byte_tokenizer(QWEN2_5)  # which lists tools, and is left to it
    own = tokenizer.apply_chat_template(system, tools=[TOOL], tokenize=False, add_generation_prompt=True)
    assert ChatTemplate(tokenizer).render(system, [TOOL]) == own
