"""Prompts that list tools, and completions that are conversations."""

import json

import datasets
from support.chat_templates import CHATML, GEMMA, QWEN2_5, byte_tokenizer

from grpox.data.chat import ChatTemplate
from grpox.data.prompts import PromptSet

ADD = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}
USER = [{"role": "user", "content": "sum?"}]
SYSTEM = [{"role": "system", "content": "Be brief."}, *USER]


def prompts(template, rows, tools_of=None):
    rows = datasets.Dataset.from_dict({"prompt": rows})
    return PromptSet(rows, "prompt", byte_tokenizer(template), tools_of=tools_of and (lambda made: tools_of))


def test_each_row_lists_its_own_tools():
    made = prompts(QWEN2_5, [USER, USER], lambda row: [ADD] if row else None)
    without = prompts(QWEN2_5, [USER])
    assert made.text(0) == without.text(0)
    assert made.token_ids(0) == without.token_ids(0)
    assert json.dumps(ADD) in made.text(1)
    assert made.token_ids(1) == tuple(byte_tokenizer()(made.text(1))["input_ids"])
    assert (made.tools(0), made.tools(1)) == ((), [ADD])


def test_a_template_without_tools_gets_them_in_the_message_of_the_system():
    chat = ChatTemplate(byte_tokenizer(CHATML))
    assert not chat.lists_tools
    begin, text = chat.render(SYSTEM, [ADD]).split("\n", 1)
    assert begin == "<|im_start|>system"
    assert text.startswith("Be brief.\n\nYou can call these tools.")
    assert f"<tools>\n{json.dumps(ADD)}\n</tools>" in text
    assert '<tool_call>\n{"name": ' in text
    assert chat.render(USER, [ADD]).startswith("<|im_start|>system\nYou can call these tools.")
    assert chat.render(USER, [ADD]).endswith("<|im_start|>user\nsum?<|im_end|>\n<|im_start|>assistant\n")


def test_a_template_without_system_gets_them_before_the_first_message():
    text = ChatTemplate(byte_tokenizer(GEMMA)).render(USER, [ADD])
    assert text.startswith("<s><|im_start|>user\nYou can call these tools.")
    assert text.endswith("</tool_call>\n\nsum?<|im_end|>\n<|im_start|>model\n")


def test_a_template_that_lists_tools_is_left_to_it():
    tokenizer = byte_tokenizer(QWEN2_5)
    own = tokenizer.apply_chat_template(SYSTEM, tools=[ADD], tokenize=False, add_generation_prompt=True)
    assert ChatTemplate(tokenizer).render(SYSTEM, [ADD]) == own


def test_plain_prompts_stay_as_they_are():
    with_tools = prompts(None, ["7+8="], lambda row: [ADD])
    assert with_tools.token_ids(0) == prompts(None, ["7+8="]).token_ids(0)
    assert with_tools.tools(0) == [ADD]
