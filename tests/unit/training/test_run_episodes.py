"""Episodes of a run: the tools that its rows list, and the checks before its first step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.chat_templates import QWEN2_5, byte_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from grpox.data.prompts import PromptSet
from grpox.errors import ConfigError
from grpox.runfile.load import load_run
from grpox.runtime.phases import PhaseTimes
from grpox.training.episodes import RunEpisodes
from grpox.training.inputs import open_prompts, open_tokenizer

CODE = '''
from grpox.environments import Environment, tool


class Lake(Environment):
    @tool
    def move(self, direction: str) -> str:
        """Walk.

        Args:
            direction: where to.
        """
        return direction


class Talk(Environment):
    """It has no tools."""


def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: one.
        b: another.
    """
    return a + b
'''
RUN = """
model: {path: model}
data: {path: data.jsonl}
environment:
  - {path: "code.py:Lake", when: {column: env, is: lake}}
  - {path: "code.py:Talk", when: {column: env, is: talk}}
tools: ["code.py:add"]
rewards: [{path: "reward.py:score"}]
"""


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    tokenizer = byte_tokenizer(QWEN2_5)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    special = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None, "pad_token_id": None}
    config = LlamaConfig(vocab_size=len(tokenizer), **sizes, **special)
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rows = [{"prompt": [{"role": "user", "content": "a"}], "env": env} for env in ("lake", "talk") * 32]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    (folder / "code.py").write_text(CODE, encoding="utf-8")
    (folder / "reward.py").write_text("def score(completions, **columns): return [0.0] * len(completions)")
    (folder / "run.yaml").write_text(RUN, encoding="utf-8")
    return folder / "run.yaml"


def opened(run_file: Path, *overrides: str) -> tuple[RunEpisodes, PromptSet, int]:
    run = load_run(str(run_file), list(overrides), world_size=1)
    environments: Any = ()  # nothing is sampled
    episodes, tokenizer = RunEpisodes(run, environments), open_tokenizer(run)
    prompts, _ = open_prompts(run, tokenizer, episodes=episodes)
    return episodes, prompts, tokenizer.convert_tokens_to_ids("<|im_end|>")


def test_a_row_lists_the_tools_of_its_environment_and_of_the_run(run_file: Path) -> None:
    episodes, prompts, _ = opened(run_file)
    names = [[tool["function"]["name"] for tool in prompts.tools(row)] for row in (0, 1)]
    assert names == [["add", "move"], ["add"]]
    assert ['"move"' in prompts.text(row) for row in (0, 1)] == [True, False]
    call = '<tool_call>{"name": "move", "arguments": {}}</tool_call>'
    ids = prompts.chat.tokenizer(call)["input_ids"]
    assert episodes.tokens_of(prompts).read(ids, 0)[1].calls[0].name == "move"


def test_stop_tokens_without_the_end_of_a_turn_are_refused(run_file: Path) -> None:
    episodes, _, end = opened(run_file)
    world: Any = None
    episodes.loop(world, PhaseTimes(), (1, end))
    with pytest.raises(ConfigError, match=r"sampling.stop_token_ids: lacks <\|im_end\|>"):
        episodes.loop(world, PhaseTimes(), (1,))
    for own in (f"sampling.stop_token_ids=[{end}]", "sampling.stop=['<|im_end|>']"):
        opened(run_file, own)[0].loop(world, PhaseTimes(), (1,))
