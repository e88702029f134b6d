"""Tokens of turns: those between two turns, as the template writes them, and the calls of tools in a turn.

Calls are read as JSON, never evaluated, and never lost where they are broken.
"""

import contextlib
import json
import random

import datasets
import pytest
from support.chat_templates import CHATML, GEMMA, LLAMA3, QWEN2_5, QWEN3, WORKING, byte_tokenizer
from support.problems import problem_of

from grpox.contracts import ToolCall, ToolResult
from grpox.data.chat import ChatTemplate
from grpox.data.prompts import PromptLimit, PromptSet
from grpox.environments import Appended
from grpox.environments.tools import Toolbox
from grpox.errors import ConfigError, RunFailed
from grpox.rollout.episodes.bridge import Bridge
from grpox.rollout.episodes.calls import ResponseReader, call_reader, read_hermes, read_json
from grpox.rollout.episodes.turn_tokens import MARK, TurnTokens

PARAMETERS = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "description": "one"},
        "b": {"type": "string", "description": "two"},
    },
    "required": ["a"],
}
ADD = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": PARAMETERS}}
USER = [{"role": "user", "content": "sum?"}]
TWO = [
    ToolResult(ToolCall("add", '{"a": 1}'), "12"),
    ToolResult(ToolCall("add", "{}"), "Error: no a", "arguments"),
]


def tokens_of(template, prompt=USER, tools=(), limit=None, response_template=None, **options):
    settings = {"response_template": response_template} if response_template else {}
    tokenizer = byte_tokenizer(template, **settings)
    rows = datasets.Dataset.from_dict({"prompt": [prompt]})
    prompts = PromptSet(
        rows, "prompt", tokenizer, limit=limit, tools_of=lambda prompts: lambda row: list(tools)
    )
    return TurnTokens(prompts, tools, **options), tokenizer


def ids_of(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def text_between(template, answer, results=(), ending="", **settings):
    """The bridge behind the turn "ab" with `ending`, as text."""
    tokens, tokenizer = tokens_of(template, **settings)
    turn = ids_of(tokenizer, "ab" + ending)
    ids = tokens.bridge(turn, tokens.messages(answer, results))
    return tokenizer.decode(ids)


CHATML_BRIDGE = "\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
LLAMA_BRIDGE = (
    "<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
)


@pytest.mark.parametrize(
    ("template", "end", "after"),
    [
        (CHATML, "<|im_end|>", CHATML_BRIDGE),
        (QWEN2_5, "<|im_end|>", CHATML_BRIDGE),
        (QWEN3, "<|im_end|>", CHATML_BRIDGE),
        (LLAMA3, "<|eot_id|>", LLAMA_BRIDGE),
        (GEMMA, "<|im_end|>", CHATML_BRIDGE.replace("assistant", "model")),
    ],
)
def test_the_end_token_stands_once_and_the_newline_behind_it_is_not_lost(template, end, after):
    assert text_between(template, "hi", ending=end) == after
    assert text_between(template, "hi") == end + after  # ended by a stop text
    assert text_between(template, "hi", ending="<|endoftext|>") == end + after  # by another stop token
    assert text_between(template, "hi", ending="<") == end + after


def test_a_template_that_lists_tools_writes_results_in_its_own_form():
    results = "<tool_response>\n12\n</tool_response>\n<tool_response>\nError: no a\n</tool_response>"
    expected = f"<|im_end|>\n<|im_start|>user\n{results}<|im_end|>\n<|im_start|>assistant\n"
    assert text_between(QWEN2_5, None, TWO, tools=[ADD]) == expected
    assert text_between(QWEN3, None, TWO, tools=[ADD]) == expected
    header = "<|start_header_id|>ipython<|end_header_id|>\n\n"
    assert text_between(LLAMA3, None, TWO, tools=[ADD]) == (
        f'<|eot_id|>{header}"12"<|eot_id|>{header}"Error: no a"<|eot_id|>'
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )


@pytest.mark.parametrize("template", [CHATML, GEMMA])
def test_a_template_without_tools_gets_results_as_a_message_of_the_user(template):
    results = "<tool_response>\n12\n</tool_response>\n<tool_response>\nError: no a\n</tool_response>"
    text = text_between(template, "Go on.", TWO, tools=[ADD])
    assert text.startswith(f"<|im_end|>\n<|im_start|>user\n{results}\nGo on.<|im_end|>\n<|im_start|>")


def random_text(draw):
    words = ["x", "ü", "{}", "<b>", "1 + 1 =", "\n- ", "\n\n", "'quoted'", "</s>", "日本"]
    return "a" + " ".join(draw.choices(words, k=draw.randint(0, 5))) + "z"


def random_calls(draw, template):
    if template == LLAMA3:
        return '{"name": "add", "parameters": {"a": 1}}'
    call = '\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    return "I add." + call * draw.randint(1, 3)


@pytest.mark.parametrize(
    ("name", "calls"),
    [*((name, False) for name in WORKING), *((n, True) for n in ("qwen2.5", "qwen3", "llama3"))],
)
def test_prompt_turns_and_bridges_are_the_conversation_as_the_template_writes_it(name, calls):
    """Random conversations; no template leaves out anything of turns without thinking and outer space."""
    draw, tools = random.Random(name), [ADD] if calls else []
    tokens, tokenizer = tokens_of(WORKING[name], tools=tools)
    for _ in range(30):
        conversation, ids = list(USER), list(tokens.prompt(0, None))
        for _ in range(draw.randint(1, 4)):
            said = random_calls(draw, WORKING[name]) if calls else random_text(draw)
            turn = ids_of(tokenizer, said + draw.choice([tokenizer.eos_token, ""]))
            message, action = tokens.read(turn, 0)
            assert len(action.calls) == (said.count('"name"') if calls else 0)
            results = [ToolResult(each, f"{draw.random()}") for each in action.calls]
            messages = tokens.messages(None if calls else random_text(draw), results)
            before = list(ids)
            ids += [*turn, *tokens.bridge(turn, messages)]
            assert ids[: len(before)] == before
            conversation += [message, *messages]
        whole = tokenizer.apply_chat_template(
            conversation, tools=tools or None, tokenize=False, add_generation_prompt=True
        )
        assert tokenizer.decode(ids) == whole
        assert ids == ids_of(tokenizer, whole)


def test_thinking_stays_in_the_tokens_although_the_template_leaves_it_out_of_the_history():
    tokens, tokenizer = tokens_of(QWEN3)
    said = "<think>\n1 + 1\n</think>\n\n2<|im_end|>"
    turn = ids_of(tokenizer, said)
    messages = tokens.messages("And 3?")
    written = tokenizer.decode([*tokens.prompt(0, None), *turn, *tokens.bridge(turn, messages)])
    assert said + "\n<|im_start|>user\nAnd 3?<|im_end|>\n<|im_start|>assistant\n" in written
    history = [*USER, {"role": "assistant", "content": said.removesuffix("<|im_end|>")}, *messages]
    assert "1 + 1" not in tokenizer.apply_chat_template(history, tokenize=False)


NUMBERED = CHATML.replace(
    "'<|im_end|>\\n' }}\n{%- endfor", "'<|im_end|>' + loop.index | string + '\\n' }}\n{%- endfor"
)
BY_CONTENT = CHATML.replace(
    "'<|im_end|>\\n' }}\n{%- endfor",
    "'<|im_end|>' + ('\\n' if '\\n' in message.content else '') }}\n{%- endfor",
)
NO_TURNS = CHATML.replace(
    "message.content + '<|im_end|>", "(message.content if message.role != 'assistant' else '') + '<|im_end|>"
)
NO_RESULTS = QWEN2_5.replace("+ message.content + '\\n</tool_response>'", "+ '\\n</tool_response>'")
NO_TOOL_ROLE = QWEN2_5.replace(
    "{%- elif message.role == 'tool' %}", "{%- elif message.role == 'tool' %}{{ raise_exception('no tools') }}"
)


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (NUMBERED, "depends on what stands before: '<|im_end|>3"),
        (BY_CONTENT, "depends on what stands before"),
        (NO_TURNS, "leaves out the text of a turn"),
        (NO_RESULTS, "leaves out messages with the role tool"),
        (NO_TOOL_ROLE, "fails on a message with the role tool after a turn: TemplateError: no tools"),
    ],
)
def test_a_template_whose_bridge_is_not_certain_is_refused_by_name(template, problem):
    assert template not in WORKING.values()
    tokenizer = byte_tokenizer(template)
    tokenizer.name_or_path = "some/model"
    what = problem_of(Bridge, ChatTemplate(tokenizer), [ADD])
    assert problem in what.what
    assert (what.key, what.given) == ("model.path", "some/model")
    assert "model.chat_template_kwargs.chat_template" in what.allowed


@pytest.mark.parametrize("role", ["assistant", "system", "ipython"])
def test_an_answer_in_a_role_that_was_not_tried_is_refused(role):
    tokens, _ = tokens_of(CHATML)
    with pytest.raises(RunFailed, match=f"role '{role}'; the roles that may answer are user, tool"):
        tokens.messages([{"role": "user", "content": "a"}, {"role": role, "content": "b"}])
    assert tokens.prompt(0, [{"role": "system", "content": "b"}])


def test_parts_of_text_are_joined_and_others_refused():
    tokens, _ = tokens_of(CHATML)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert tokens.messages([{"role": "user", "content": parts}]) == [{"role": "user", "content": "ab"}]
    for part in ({"type": "image_url", "image_url": "a.png"}, {"type": "image"}, "a"):
        for use in (tokens.messages, lambda answer: tokens.prompt(0, answer)):
            with pytest.raises(RunFailed, match="but grpox reads only text"):
                use([{"role": "user", "content": [parts[0], part]}])


def test_plain_prompts_get_answers_as_they_are():
    tokens, tokenizer = tokens_of(None, prompt="7+8=")
    end = ids_of(tokenizer, "?<|im_end|>")
    assert tokenizer.decode(tokens.bridge(end, tokens.messages(" 15\n"))) == " 15\n"
    assert tokenizer.decode(tokens.bridge(end, tokens.messages("!", TWO))) == "12\nError: no a\n!"
    assert tokenizer.decode(tokens.prompt(0, " (carry)")) == "7+8= (carry)"
    for use in (tokens.messages, lambda answer: tokens.prompt(0, answer)):
        with pytest.raises(RunFailed, match="it must answer with text"):
            use(USER)


def test_what_reset_answers_stands_behind_the_prompt():
    tokens, tokenizer = tokens_of(CHATML)
    begin = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nsum?"
    end = "<|im_end|>\n<|im_start|>assistant\n"
    user = "<|im_end|>\n<|im_start|>user\nboard"
    beginnings = [
        (None, begin + end),
        ("", begin + end),
        ("board", begin + user + end),
        (Appended(" board"), begin + " board" + end),
        (
            [{"role": "user", "content": "board"}, {"role": "assistant", "content": "ok"}],
            begin + user + "<|im_end|>\n<|im_start|>assistant\nok" + end,
        ),
    ]
    for content, text in beginnings:
        assert tokenizer.decode(tokens.prompt(0, content)) == text


def test_a_prompt_that_reset_makes_too_long_ends_the_run():
    tokens, _ = tokens_of(None, prompt="12345", limit=PromptLimit(8, "data.max_prompt_length"))
    assert len(tokens.prompt(0, "678")) == 8
    with pytest.raises(RunFailed, match=r"with what the environment's reset answered.*row 0.*too long"):
        tokens.prompt(0, "6789")
    tokens, tokenizer = tokens_of(None, prompt="12345", limit=PromptLimit(8, "", cut=True))
    assert tokenizer.decode(tokens.prompt(0, "6789")) == "23456789"


def test_long_answers_are_cut_to_the_limit_and_counted():
    tokens, _ = tokens_of(CHATML, longest=30)
    messages = [{"role": "user", "content": "a" * 30}]
    assert tokens.shortened(messages) == (messages, 0)
    assert tokens.shortened([{"role": "user", "content": "a" * 31}]) == (
        [{"role": "user", "content": "a" * (30 - len(MARK)) + MARK}],
        1,
    )
    (whole, cut), count = tokens.shortened(
        tokens.messages("b" * 50, [ToolResult(ToolCall("add", ""), "short")])
    )
    assert (whole["content"], count) == ("short", 1)
    assert cut["content"] == "b" * (25 - len(MARK)) + MARK  # what the short one leaves


def test_a_cut_never_parts_a_character():
    tokens, _ = tokens_of(CHATML, longest=15)
    ((message,), _) = tokens.shortened([{"role": "user", "content": "日本日本日本"}])  # three tokens each
    assert message["content"] == "日" + MARK
    tokens, _ = tokens_of(CHATML, longest=4)
    ((message,), _) = tokens.shortened([{"role": "user", "content": "日本日本日本"}])
    assert message["content"] == "日"


# -- Calls of tools ---------------------------------------------------------------------------------------

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
    calls = (ToolCall("add", '{"a": 1}'), ToolCall("now", "{}"))
    assert read.calls == calls
    one, other = '{"name": "add", "arguments": {"a": 1}}', '{"name": "now", "arguments": {}}'
    unclosed = read_hermes(f"<tool_call>{one}\n<tool_call>{other}")  # each is read up to the next
    assert (unclosed.text, unclosed.calls) == ("", calls)


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
        ("", ToolCall("", "")),
        ("[1]", ToolCall("", "[1]")),
        ('{"name": 3}', ToolCall("", '{"name": 3}')),
        ("[" * 100_000, ToolCall("", "[" * 100_000)),
        (
            '{"name": "add", "arguments": {"a": NaN}}',
            ToolCall("add", '{"name": "add", "arguments": {"a": NaN}}'),
        ),
        ('{"name": "add", "arguments": {"b": "日\\ud800"}}', ToolCall("add", '{"b": "日?"}')),
        ('{"name": "add", "arguments": [1]}', ToolCall("add", "[1]")),
        ('{"name": "add", "arguments": null}', ToolCall("add", "{}")),
        ('{"name": "add", "arguments": "{\\"a\\": 1}"}', ToolCall("add", '{"a": 1}')),
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


def test_a_tokenizer_with_a_response_template_reads_by_it():
    tokens, tokenizer = tokens_of(UNKNOWN, tools=[ADD], response_template=BRACKETS)
    text = '<think>hm</think>I add.\n[call]{"name": "add", "arguments": {"a": 1}}[/call]<|im_end|>'
    message, action = tokens.read(ids_of(tokenizer, text), 0)
    assert action.calls == (ToolCall("add", '{"a": 1}'),)
    assert message == {
        "role": "assistant",
        "content": "I add.",
        "thinking": "hm",
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
    }
    _, broken = tokens.read(ids_of(tokenizer, '[call]{"name": "add", [/call]<|im_end|>'), 0)
    assert broken.calls == (ToolCall("add", '[call]{"name": "add", [/call]'),)


def test_arguments_in_xml_get_the_types_of_the_schema():
    tokens, tokenizer = tokens_of(QWEN_XML, tools=[ADD])
    arguments = "<parameter=a>\n7\n</parameter>\n<parameter=b>\n8\n</parameter>"
    call = f"<tool_call>\n<function=add>\n{arguments}\n</function>\n</tool_call>"
    message, action = tokens.read(ids_of(tokenizer, f"So.\n\n{call}\n{call}<|im_end|>"), 0)
    assert [json.loads(each.arguments) for each in action.calls] == [{"a": 7, "b": "8"}] * 2
    assert message["content"] == "So."


def test_a_turn_becomes_a_message_with_its_calls():
    tokens, tokenizer = tokens_of(QWEN2_5, tools=[ADD])
    text = 'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    ids = ids_of(tokenizer, text + "<|im_end|>")
    message, action = tokens.read(ids, 0)
    assert action.text == text
    assert message["content"] == "I add."
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    message, cut_off = tokens.read(ids, 0, is_whole=False)
    assert (message, cut_off.calls) == ({"role": "assistant", "content": text}, ())


def test_environments_that_read_their_calls_need_no_known_form():
    tokens, tokenizer = tokens_of(UNKNOWN, tools=[ADD], has_parse=True)  # whose form nobody else need know
    message, action = tokens.read(ids_of(tokenizer, "[37+68]<|im_end|>"), 0)
    assert (action.text, action.calls) == ("[37+68]", ())
    assert message == {"role": "assistant", "content": "[37+68]"}
