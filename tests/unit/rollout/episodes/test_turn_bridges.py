"""Tokens between two turns of the model: what the template writes, and nothing twice."""

import random

import datasets
import pytest
from support.chat_templates import CHATML, GEMMA, LLAMA3, QWEN2_5, QWEN3, WORKING, byte_tokenizer

from grpox.contracts import ToolCall, ToolResult
from grpox.data.chat import ChatTemplate
from grpox.data.prompts import PromptLimit, PromptSet
from grpox.environments import Appended
from grpox.errors import ConfigError, RunFailed
from grpox.rollout.episodes.bridge import Bridge
from grpox.rollout.episodes.turn_tokens import MARK, TurnTokens

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "description": "one"}},
            "required": ["a"],
        },
    },
}
USER = [{"role": "user", "content": "sum?"}]
TWO = [
    ToolResult(ToolCall("add", '{"a": 1}'), "12"),
    ToolResult(ToolCall("add", "{}"), "Error: no a", "arguments"),
]


def tokens_of(template, prompt=USER, tools=(), longest=None, limit=None, **arguments):
    tokenizer = byte_tokenizer(template)
    rows = datasets.Dataset.from_dict({"prompt": [prompt]})
    prompts = PromptSet(
        rows, "prompt", tokenizer, arguments, limit, tools_of=lambda prompts: lambda row: list(tools)
    )
    return TurnTokens(prompts, tools, longest=longest), tokenizer


def text_between(template, answer, results=(), ending="", **settings):
    """The bridge behind the turn "ab" with `ending`, as text."""
    tokens, tokenizer = tokens_of(template, **settings)
    turn = tokenizer("ab" + ending, add_special_tokens=False)["input_ids"]
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


@pytest.mark.parametrize("name", WORKING)
def test_prompt_turns_and_bridges_are_the_conversation_as_the_template_writes_it(name):
    """Random conversations; no template leaves out anything of turns without thinking and outer space."""
    draw = random.Random(name)
    words = ["x", "ü", "{}", "<b>", "1 + 1 =", "\n- ", "\n\n", "'quoted'", "</s>", "日本"]

    def text():
        return "a" + " ".join(draw.choices(words, k=draw.randint(0, 5))) + "z"

    tokens, tokenizer = tokens_of(WORKING[name])
    end = tokenizer.eos_token
    for _ in range(40):
        conversation, ids = list(USER), list(tokens.prompt(0, None))
        for _ in range(draw.randint(1, 4)):
            said, answer = text(), text()
            turn = tokenizer(said + draw.choice([end, ""]), add_special_tokens=False)["input_ids"]
            messages = tokens.messages(answer)
            before = list(ids)
            ids += [*turn, *tokens.bridge(turn, messages)]
            assert ids[: len(before)] == before
            conversation += [{"role": "assistant", "content": said}, *messages]
        whole = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
        assert tokenizer.decode(ids) == whole
        assert ids == tokenizer(whole, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("template", [QWEN2_5, QWEN3, LLAMA3])
def test_turns_with_calls_and_their_results_are_the_conversation_too(template):
    draw = random.Random(0)
    tokens, tokenizer = tokens_of(template, tools=[ADD])
    for _ in range(20):
        conversation, ids = list(USER), list(tokens.prompt(0, None))
        for _ in range(draw.randint(1, 3)):
            count = 1 if template == LLAMA3 else draw.randint(1, 3)
            call = '\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
            said = '{"name": "add", "parameters": {"a": 1}}' if template == LLAMA3 else "I add." + call * count
            turn = tokenizer(said + draw.choice([tokenizer.eos_token, ""]), add_special_tokens=False)[
                "input_ids"
            ]
            message, action = tokens.read(turn, 0)
            assert len(action.calls) == count
            results = [ToolResult(each, f"{draw.random()}") for each in action.calls]
            messages = tokens.messages(None, results)
            ids += [*turn, *tokens.bridge(turn, messages)]
            conversation += [message, *messages]
        whole = tokenizer.apply_chat_template(
            conversation, tools=[ADD], tokenize=False, add_generation_prompt=True
        )
        assert tokenizer.decode(ids) == whole
        assert ids == tokenizer(whole, add_special_tokens=False)["input_ids"]


def test_thinking_stays_in_the_tokens_although_the_template_leaves_it_out_of_the_history():
    tokens, tokenizer = tokens_of(QWEN3)
    said = "<think>\n1 + 1\n</think>\n\n2<|im_end|>"
    turn = tokenizer(said, add_special_tokens=False)["input_ids"]
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
    with pytest.raises(ConfigError) as refused:
        Bridge(ChatTemplate(tokenizer), [ADD])
    (what,) = refused.value.problems
    assert problem in what.what
    assert (what.key, what.given) == ("model.path", "some/model")
    assert "model.chat_template_kwargs.chat_template" in what.allowed


def test_only_the_templates_that_are_broken_are_refused():
    for template in WORKING.values():
        Bridge(ChatTemplate(byte_tokenizer(template)), [ADD])


@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": "a.png"}, {"type": "image"}, "a"])
def test_parts_that_are_not_text_are_refused(part):
    tokens, _ = tokens_of(CHATML)
    content = [{"type": "text", "text": "Look:"}, part]
    for use in (tokens.messages, lambda answer: tokens.prompt(0, answer)):
        with pytest.raises(RunFailed, match="but grpox reads only text"):
            use([{"role": "user", "content": content}])


@pytest.mark.parametrize("role", ["assistant", "system", "ipython"])
def test_an_answer_in_a_role_that_was_not_tried_is_refused(role):
    tokens, _ = tokens_of(CHATML)
    with pytest.raises(RunFailed, match=f"role '{role}'; the roles that may answer are user, tool"):
        tokens.messages([{"role": "user", "content": "a"}, {"role": role, "content": "b"}])
    assert tokens.prompt(0, [{"role": "system", "content": "b"}])


def test_parts_of_text_are_joined():
    tokens, _ = tokens_of(CHATML)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert tokens.messages([{"role": "user", "content": parts}]) == [{"role": "user", "content": "ab"}]


def test_plain_prompts_get_answers_as_they_are():
    tokens, tokenizer = tokens_of(None, prompt="7+8=")
    end = tokenizer("?<|im_end|>", add_special_tokens=False)["input_ids"]
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
