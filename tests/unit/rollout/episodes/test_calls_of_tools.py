"""Calls of tools in a turn's text: read as JSON, never evaluated, and never lost where they are broken."""

import contextlib
import json

import datasets
import pytest
from support.chat_templates import CHATML, GEMMA, LLAMA3, QWEN2_5, QWEN3, byte_tokenizer

from grpox.contracts import ToolCall
from grpox.data.chat import ChatTemplate
from grpox.data.prompts import PromptSet
from grpox.environments.tools import Toolbox
from grpox.errors import ConfigError
from grpox.rollout.episodes.calls import ResponseReader, call_reader, read_hermes, read_json
from grpox.rollout.episodes.turn_tokens import TurnTokens

PARAMETERS = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "description": "one"},
        "b": {"type": "string", "description": "two"},
    },
}
ADD = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": PARAMETERS}}

QWEN_XML = QWEN2_5.replace(
    """{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}""",
    """{{- '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}
        {%- for name, value in call.function.arguments | items %}
            {{- '<parameter=' + name + '>\\n' + value | string + '\\n</parameter>\\n' }}
        {%- endfor %}
        {{- '</function>\\n</tool_call>' }}""",
)
UNKNOWN = QWEN2_5.replace("<tool_call>", "[call]").replace("</tool_call>", "[/call]")


def test_hermes_calls_are_taken_out_of_the_text():
    read = read_hermes(
        'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>{"name": "now"}</tool_call>'
    )
    assert read.text == "I add."
    assert read.calls == (ToolCall("add", '{"a": 1}'), ToolCall("now", "{}"))


def test_a_turn_without_calls_is_its_text():
    for text in (" 3 ", "", "tool_call", '{"a": 1}', '{"answer": 3}'):
        assert (read_hermes(text).text, read_hermes(text).calls) == (text, ())
        assert (read_json(text).text, read_json(text).calls) == (text, ())
    for text in ('{"name": "Ada", "born": 1815}', '{"type": "circle", "name": "a"}', '{"name": "Ada"} is she'):
        assert (read_json(text).text, read_json(text).calls) == (text, ())


@pytest.mark.parametrize(
    ("body", "call"),
    [
        ('{"name": "add", "arguments": {"a": 1}', ToolCall("add", '{"name": "add", "arguments": {"a": 1}')),
        ("add(1, 2)", ToolCall("", "add(1, 2)")),
        ("__import__('os').getcwd()", ToolCall("", "__import__('os').getcwd()")),
        ("", ToolCall("", "")),
        ("[1]", ToolCall("", "[1]")),
        ('{"name": 3}', ToolCall("", '{"name": 3}')),
        ("[" * 100_000, ToolCall("", "[" * 100_000)),
        (
            '{"name": "add", "arguments": {"a": NaN}}',
            ToolCall("add", '{"name": "add", "arguments": {"a": NaN}}'),
        ),
        ('{"name": "add", "arguments": {"b": "\\ud800"}}', ToolCall("add", '{"b": "?"}')),
        ('{"name": "add", "arguments": [1]}', ToolCall("add", "[1]")),
        ('{"name": "add", "arguments": null}', ToolCall("add", "{}")),
        ('{"name": "add", "arguments": "{\\"a\\": 1}"}', ToolCall("add", '{"a": 1}')),
        ('{"name": "add", "arguments": {"b": "日"}}', ToolCall("add", '{"b": "日"}')),
    ],
)
def test_a_broken_call_stays_a_call(body, call):
    assert read_hermes(f"<tool_call>{body}</tool_call>").calls == (call,)


def test_a_call_that_cannot_be_read_gets_an_error_text_for_its_arguments():
    calls = (*read_hermes("<tool_call>add(1, 2)</tool_call>").calls, ToolCall("sub", "{}"))
    box = Toolbox({}, None, max_calls=1, seconds=1.0, limit=lambda what: contextlib.nullcontext())
    with pytest.raises(StopIteration) as ended:
        next(box.run(calls))
    nameless, unknown = ended.value.value
    assert nameless.failure == "arguments"
    assert "a call is a JSON object with the name of a tool" in nameless.content
    assert unknown.failure == "unknown"  # though it is beyond the limit: a metric has the name of a real tool


def test_a_call_that_is_not_closed_is_read_to_the_next():
    one, other = '{"name": "add", "arguments": {"a": 1}}', '{"name": "now", "arguments": {}}'
    read = read_hermes(f"<tool_call>{one}\n<tool_call>{other}")
    assert read.calls == (ToolCall("add", '{"a": 1}'), ToolCall("now", "{}"))
    assert read.text == ""


def test_llama_calls_follow_each_other():
    one, other = '{"name": "add", "parameters": {"a": 1}}', '{"name": "now", "parameters": {}}'
    calls = (ToolCall("add", '{"a": 1}'), ToolCall("now", "{}"))
    for between in ("; ", "\n", ""):
        assert read_json(f"{one}{between}{other}").calls == calls
    assert read_json(f"<|python_tag|>{one}").calls == calls[:1]
    typed = one.replace("{", '{"type": "function", ', 1)
    assert read_json(typed).calls == calls[:1]
    read = read_json(f"{one} as you see")
    assert (read.calls, read.text) == (calls[:1], "as you see")
    assert read_json('{"name": "add", "parameters": {"a": ').calls == (
        ToolCall("add", '{"name": "add", "parameters": {"a":'),
    )


@pytest.mark.parametrize(
    ("template", "reader"),
    [
        (CHATML, read_hermes),
        (GEMMA, read_hermes),
        (QWEN2_5, read_hermes),
        (QWEN3, read_hermes),
        (LLAMA3, read_json),
        (QWEN_XML, ResponseReader),
    ],
)
def test_the_reader_is_that_of_the_form_that_the_template_writes(template, reader):
    found = call_reader(ChatTemplate(byte_tokenizer(template)), [ADD])
    assert found is reader or type(found) is reader


def test_a_template_of_an_unknown_form_is_refused_by_name():
    assert UNKNOWN != QWEN2_5
    tokenizer = byte_tokenizer(UNKNOWN)
    tokenizer.name_or_path = "some/model"
    with pytest.raises(ConfigError, match=r"calls of tools in a form that grpox does not read\n.*some/model"):
        call_reader(ChatTemplate(tokenizer), [ADD])


BRACKETS = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>", "content": "text"},
        "content": {"close": "<|im_end|>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*\[call\]",
            "close": "[/call]",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
    },
}


def turn_tokens(template, **settings):
    tokenizer = byte_tokenizer(template, **settings)
    rows = datasets.Dataset.from_dict({"prompt": [[{"role": "user", "content": "sum?"}]]})
    prompts = PromptSet(rows, "prompt", tokenizer, tools_of=lambda prompts: lambda row: [ADD])
    return prompts, tokenizer


def test_a_tokenizer_with_a_response_template_reads_by_it():
    prompts, tokenizer = turn_tokens(UNKNOWN.replace("[/tool_call]", "[/call]"), response_template=BRACKETS)
    tokens = TurnTokens(prompts, [ADD])
    text = '<think>hm</think>I add.\n[call]{"name": "add", "arguments": {"a": 1}}[/call]<|im_end|>'
    message, action = tokens.read(tokenizer(text)["input_ids"], 0)
    assert action.calls == (ToolCall("add", '{"a": 1}'),)
    assert message == {
        "role": "assistant",
        "content": "I add.",
        "thinking": "hm",
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
    }
    _, broken = tokens.read(tokenizer('[call]{"name": "add", [/call]<|im_end|>')["input_ids"], 0)
    assert broken.calls == (ToolCall("add", '[call]{"name": "add", [/call]'),)


def test_arguments_in_xml_get_the_types_of_the_schema():
    prompts, tokenizer = turn_tokens(QWEN_XML)
    arguments = "<parameter=a>\n7\n</parameter>\n<parameter=b>\n8\n</parameter>"
    call = f"<tool_call>\n<function=add>\n{arguments}\n</function>\n</tool_call>"
    message, action = TurnTokens(prompts, [ADD]).read(
        tokenizer(f"So.\n\n{call}\n{call}<|im_end|>")["input_ids"], 0
    )
    assert [json.loads(each.arguments) for each in action.calls] == [{"a": 7, "b": "8"}] * 2
    assert message["content"] == "So."


def test_a_turn_becomes_a_message_with_its_calls():
    prompts, tokenizer = turn_tokens(QWEN2_5)
    tokens = TurnTokens(prompts, [ADD])
    text = 'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    ids = tokenizer(text + "<|im_end|>")["input_ids"]
    message, action = tokens.read(ids, 0)
    assert action.text == text
    assert message["content"] == "I add."
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    message, cut_off = tokens.read(ids, 0, is_whole=False)
    assert (message, cut_off.calls) == ({"role": "assistant", "content": text}, ())


def test_environments_that_read_their_calls_need_no_known_form():
    prompts, tokenizer = turn_tokens(UNKNOWN)  # whose form nobody else need know
    tokens = TurnTokens(prompts, [ADD], has_parse=True)
    message, action = tokens.read(tokenizer("[37+68]<|im_end|>")["input_ids"], 0)
    assert (action.text, action.calls) == ("[37+68]", ())
    assert message == {"role": "assistant", "content": "[37+68]"}
