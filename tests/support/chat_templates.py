"""Chat templates that behave as those of well-known models, and a tokenizer of bytes for them."""

from __future__ import annotations

from typing import Any

CHATML = """\
{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""As SmolLM2's: it knows no tools."""

_TOOLS = """\
{%- set first = messages[0].content if messages[0].role == 'system' else 'Be kind.' %}
{{- '<|im_start|>system\\n' + first }}
{%- if tools %}
    {{- '\\n# Tools' }}
    {%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}"""
_CALLS = """\
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
    {%- endfor %}"""
_RESULTS = """\
    {%- elif message.role == 'tool' %}
        {%- if messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
QWEN2_5 = f"""{_TOOLS}
{{%- for message in messages %}}
    {{%- if message.role == 'user' %}}{{{{ '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}}}
    {{%- elif message.role == 'assistant' %}}
        {{{{- '<|im_start|>assistant\\n' + message.content }}}}
{_CALLS}
        {{{{- '<|im_end|>\\n' }}}}
{_RESULTS}"""
"""As Qwen2.5's: it lists tools, and writes their results as messages of the user."""

QWEN3 = f"""{_TOOLS}
{{%- set ns = namespace(last=-1) %}}
{{%- for message in messages %}}
    {{%- if message.role == 'user' and not message.content.startswith('<tool_response>') %}}
        {{%- set ns.last = loop.index0 %}}
    {{%- endif %}}
{{%- endfor %}}
{{%- for message in messages %}}
    {{%- if message.role == 'user' %}}{{{{ '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}}}
    {{%- elif message.role == 'assistant' %}}
        {{%- set thought = message.content.split('</think>')[0].split('<think>')[-1].strip('\\n')
            if '</think>' in message.content else '' %}}
        {{%- set answer = message.content.split('</think>')[-1].lstrip('\\n') %}}
        {{{{- '<|im_start|>assistant\\n' }}}}
        {{%- if loop.index0 > ns.last and (loop.last or thought) %}}
            {{{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}}}
        {{%- endif %}}
        {{{{- answer }}}}
{_CALLS}
        {{{{- '<|im_end|>\\n' }}}}
{_RESULTS}"""
"""As Qwen3's: it leaves out the thinking of turns before the user's last message."""

LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {%- if message.tool_calls | length > 1 %}{{ raise_exception('one call at a time') }}{% endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name }}
        {{- '", "parameters": ' + (call.arguments | tojson) + '}<|eot_id|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (message.content | tojson) + '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
        {%- if loop.first %}
            {%- for tool in tools or [] %}{{ (tool | tojson) + '\\n\\n' }}{% endfor %}
        {%- endif %}
        {{- (message.content | trim) + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
"""As Llama 3.1's: it removes space around messages, and has a role of its own for results of tools."""

GEMMA = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) or message.role == 'system' %}
        {{- raise_exception('user and assistant must alternate') }}
    {%- endif %}
    {{- '<|im_start|>' + ('model' if message.role == 'assistant' else 'user') + '\\n' }}
    {{- (message.content | trim) + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>model\\n' }}{% endif %}"""
"""As Gemma's: no system, no tools, and roles that take turns."""

WORKING = {"chatml": CHATML, "qwen2.5": QWEN2_5, "qwen3": QWEN3, "llama3": LLAMA3, "gemma": GEMMA}

_SPECIAL = [
    *("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<s>"),
    *("<|endoftext|>", "<pad>"),
]


def byte_tokenizer(template: str | None = None, end: str = "<|im_end|>", **settings: Any) -> Any:
    """A real fast tokenizer: each byte is a token, and each of `_SPECIAL`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: place for place, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, special=True) for text in _SPECIAL])
    end = "<|eot_id|>" if template == LLAMA3 else end
    tokens = {"eos_token": end, "pad_token": "<pad>", "bos_token": "<s>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, chat_template=template, **tokens, **settings)
