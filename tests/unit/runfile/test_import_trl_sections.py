"""`grpox import-trl` of tools, environments, adapters, evaluations and the best model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from grpox.runfile.from_trl.convert import convert
from grpox.runfile.from_trl.draft import Draft, run_file_text
from grpox.runfile.from_trl.fields import Verdict
from grpox.runfile.from_trl.script import read_script
from grpox.runfile.from_trl.setup import read_trl_yaml
from grpox.runfile.load import load_run
from grpox.runfile.yaml_lines import read_yaml

SCRIPT = """\
from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
{before}

RANK = 8


class Counter:
    def reset(self, **row): ...
{reward}

def main():
    trainer = GRPOTrainer(
        model="org/model",
        args=GRPOConfig({fields}),
        train_dataset=load_dataset("org/data"),
        {arguments}
    )
    trainer.train()


if __name__ == "__main__":
    main()
"""
ADD = "def add(a: int) -> int:\n    '''Add one.\n\n    Args:\n        a: to it.\n    '''\n    return a + 1\n"
GET_REWARD = "\n    def get_reward(self) -> float:\n        return 1.0\n"
JUDGED = "reward_funcs='org/judge', "


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def of_script(arguments: str, fields: str = "", reward: str = "", before: str = "") -> Draft:
    text = SCRIPT.format(arguments=arguments, fields=fields, reward=reward, before=before)
    Path("train.py").write_text(text)
    return convert(read_script(text, Path("train.py"), "train.py"), Path())


def of_yaml(*lines: str) -> Draft:
    names = "model_name_or_path: org/model\ndataset_name: org/data\nreward_funcs: [mine.accuracy_reward]\n"
    Path("mine.py").write_text("def accuracy_reward(completions, **_): ...\n")
    return convert(read_trl_yaml(names + "\n".join(lines), "grpo.yaml"), Path())


def written(draft: Draft) -> dict[str, Any]:
    data: dict[str, Any] = read_yaml(run_file_text(draft), "run.yaml").data
    return data


def outcome(draft: Draft, name: str) -> tuple[Verdict, str]:
    [found] = [row for row in draft.rows if row.name == name]
    return found.verdict, found.message


def verdicts(draft: Draft) -> dict[str, Verdict]:
    return {row.name: row.verdict for row in draft.rows}


def test_tools_of_a_file_and_the_number_of_turns(folder: Path) -> None:
    Path("tools.py").write_text(ADD)
    draft = of_script(f"{JUDGED}tools=[add]", "max_tool_calling_iterations=3", before="from tools import add")
    assert written(draft)["tools"] == ["tools.py:add"]
    assert written(draft)["episodes"] == {"max_turns": 4}
    Path("run.yaml").write_text(run_file_text(draft))
    assert load_run("run.yaml", world_size=1).config.tools == [f"{folder}/tools.py:add"]


def test_environments_of_the_script_and_their_own_rewards() -> None:
    run = written(of_script("environment_factory=Counter", reward=GET_REWARD))
    assert run["environment"] == {"path": "train.py:Counter"}
    assert run["rewards"] == [{"name": "environment"}]
    run = written(of_script(f"{JUDGED}environment_factory=Counter"))
    assert run["rewards"] == [{"name": "reward_model", "model": "org/judge"}]
    # Several are chosen by the column environment.
    for name in ("chess", "go"):
        Path(f"{name}.py").write_text(f"class {name.title()}:\n    def reset(self, **row): ...\n")
    both = "environment_factory={'chess': Chess, 'go': Go}"
    run = written(of_script(JUDGED + both, before="from chess import Chess\nfrom go import Go"))
    assert run["environment"] == [
        {"path": "chess.py:Chess", "when": {"column": "environment", "is": "chess"}},
        {"path": "go.py:Go", "when": {"column": "environment", "is": "go"}},
    ]
    # A class that the script does not show may have get_reward.
    assert {"name": "environment"} in run["rewards"]


@pytest.mark.parametrize(
    ("arguments", "blank"),
    [
        ("environment_factory=lambda: Counter()", "# environment: {path: 'environment.py:Name'}"),
        ("tools=make_tools()", "# tools: ['tools.py:name']"),
        ("tools=[lambda a: a]", "# tools: ['tools.py:name']"),
    ],
)
def test_what_the_script_does_not_show_is_left_to_the_user(arguments: str, blank: str) -> None:
    draft = of_script(JUDGED + arguments)
    assert not written(draft).keys() & {"environment", "tools"}
    assert blank in run_file_text(draft)


def of_lora(config: str, before: str = "") -> Draft:
    return of_script(f"reward_funcs=[], peft_config={config}", before=before)


def lora_of(draft: Draft) -> Any:
    return written(draft)["model"].get("lora")


def test_a_lora_config_of_literals_becomes_the_section() -> None:
    draft = of_lora("LoraConfig(r=RANK, lora_alpha=16, target_modules=['q_proj', 'v_proj'], lora_dropout=0.1)")
    assert lora_of(draft) == {"r": 8, "alpha": 16, "target_modules": ["q_proj", "v_proj"]}
    told = verdicts(draft)
    assert told["peft_config.r"] == told["peft_config.target_modules"] == Verdict.SAME
    assert told["peft_config.lora_dropout"] == Verdict.DIFFERS
    # One that is named, with peft's defaults.
    draft = of_lora("peft_config", "peft_config = LoraConfig(task_type='CAUSAL_LM', use_rslora=True)")
    assert lora_of(draft) == {"r": 8, "alpha": 8, "target_modules": "all-linear", "use_rslora": True}
    assert verdicts(draft)["peft_config.task_type"] == Verdict.NOT_NEEDED
    # A regular expression of layers is not taken for a name.
    draft = of_lora("LoraConfig(target_modules=r'.*\\.q_proj')")
    assert lora_of(draft)["target_modules"] == "all-linear"
    assert verdicts(draft)["peft_config.target_modules"] == Verdict.DIFFERS
    assert lora_of(of_lora("LoraConfig(target_modules='q_proj')"))["target_modules"] == ["q_proj"]
    # What is no literal is a blank.
    draft = of_lora("get_peft_config(args)")
    assert verdicts(draft)["peft_config"] == Verdict.UNREAD
    assert "# lora: {r: 16, alpha: 32}" in run_file_text(draft)
    assert verdicts(of_lora("LoraConfig(r=rank())"))["peft_config.r"] == Verdict.UNREAD
    assert lora_of(of_lora("None")) is None


@pytest.mark.parametrize("given", ["modules_to_save=['lm_head']", "use_dora=True", "layers_to_transform=[1]"])
def test_unsupported_adapter_settings_are_reported(given: str) -> None:
    draft = of_lora(f"LoraConfig({given})")
    assert verdicts(draft)[f"peft_config.{given.partition('=')[0]}"] == Verdict.UNSUPPORTED
    assert "Not carried over" in run_file_text(draft)


def test_parameters_are_carried_over_and_are_alone_without_named_layers() -> None:
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    expected = {"r": 8, "alpha": 8, "target_modules": [], "target_parameters": names}
    draft = of_lora(f"LoraConfig(target_parameters={names})")
    assert lora_of(draft) == expected
    assert verdicts(draft)["peft_config.target_parameters"] == Verdict.SAME
    assert lora_of(of_lora(f"LoraConfig(target_modules=[], target_parameters={names})")) == expected
    beside = of_lora(f"LoraConfig(target_modules='all-linear', target_parameters={names})")
    assert lora_of(beside) == expected | {"target_modules": "all-linear"}
    of_file = of_yaml("use_peft: true", f"lora_target_parameters: [{', '.join(names)}]")
    assert lora_of(of_file) == expected | {"r": 16, "alpha": 32}
    assert verdicts(of_file)["lora_target_parameters"] == Verdict.SAME


def test_the_fields_of_a_yaml_file_which_do_nothing_without_use_peft() -> None:
    draft = of_yaml("use_peft: true", "lora_r: 4", "lora_target_modules: [q_proj, v_proj]", "lora_dropout: 0.1")
    assert lora_of(draft) == {"r": 4, "alpha": 32, "target_modules": ["q_proj", "v_proj"]}
    assert verdicts(draft)["use_peft"] == verdicts(draft)["lora_r"] == Verdict.SAME
    assert verdicts(draft)["lora_dropout"] == Verdict.DIFFERS
    assert lora_of(of_yaml("use_peft: yes")) == {"r": 16, "alpha": 32, "target_modules": "all-linear"}
    draft = of_yaml("use_peft: true", "lora_target_modules: all-linear")
    assert lora_of(draft)["target_modules"] == "all-linear"
    draft = of_yaml("lora_r: 4")
    assert lora_of(draft) is None
    assert verdicts(draft)["lora_r"] == Verdict.NOT_NEEDED


def test_completions_of_each_prompt_are_sampled_as_trl_samples_them() -> None:
    draft = of_yaml("eval_strategy: steps", "eval_steps: 7", "num_generations_eval: 4", "temperature: 0.7")
    line = "# evaluation: {path: held-out.jsonl, every: 7, num_generations: 4, temperature: 0.7}\n"
    assert line in run_file_text(draft)
    verdict, told = outcome(draft, "num_generations_eval")
    assert (verdict, told.partition(":")[0]) == (Verdict.DIFFERS, "evaluation.num_generations")
    # Without evaluations their number is not needed.
    assert outcome(of_yaml("num_generations_eval: 4"), "num_generations_eval")[0] is Verdict.NOT_NEEDED


def of_best(metric: str, *lines: str) -> Draft:
    best = ("load_best_model_at_end: true", f"metric_for_best_model: {metric}")
    return of_yaml("eval_strategy: steps", *best, *lines)


@pytest.mark.parametrize(
    ("metric", "ours"),
    [
        ("reward", "evaluation/reward"),
        ("eval_reward", "evaluation/reward"),
        ("eval_rewards/accuracy_reward/mean", "evaluation/rewards/accuracy_reward/mean"),
        ("completions/mean_length", "evaluation/completions/mean_length"),
    ],
)
def test_the_best_model_is_chosen_by_an_evaluation(metric: str, ours: str) -> None:
    draft = of_best(metric, "greater_is_better: false")
    assert f"\n  # best: {ours}\n" in run_file_text(draft)
    assert draft.values["checkpoint"]["best_is"] == "lowest"
    assert outcome(draft, "metric_for_best_model") == (Verdict.SAME, f"checkpoint.best: {ours}")


@pytest.mark.parametrize("metric", ["loss", "eval_rewards/other/mean"])
def test_a_metric_that_grpox_has_not_is_asked_for(metric: str) -> None:
    text = run_file_text(of_best(metric))
    assert "\n# checkpoint: {best: evaluation/reward}\n" in text
    assert f"TRL has {metric.removeprefix('eval_')}" in text
