"""Objects given to `grpox.train`: what they replace in the config, and those that no run can use."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from support.architectures import tiny_model
from support.problems import refused
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
)

from grpox import Run, train
from grpox.config import RunConfig
from grpox.runfile.load import ResolvedRun, load_run, resolve_config
from grpox.runfile.objects import GIVEN, MERGED, RunObjects
from grpox.training import arguments as settings_of_adapters
from grpox.training.arguments import LONGEST_STREAM, as_dataset, read_arguments

ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(9)]
BATCH = {"num_generations": 4, "per_device_train_batch_size": 8}
SHORT = {"max_completion_length": 4}
"""Fits the 64 positions of the model."""
TOKENIZER = Path(__file__).parents[3] / "grpox" / "runfile" / "recipes" / "quickstart" / "model"

EXPERTS = ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
CONFIG = {"model": {"path": str(TOKENIZER)}, "train": BATCH, "sampling": SHORT}


def tiny(**changes: Any) -> LlamaConfig:
    sizes = {"vocab_size": 17, "hidden_size": 8, "intermediate_size": 8}
    return LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2, **changes)


def brevity(completions: list[str], **_: Any) -> list[float]:
    return [-float(len(completion)) for completion in completions]


@pytest.fixture
def model() -> LlamaForCausalLM:
    return LlamaForCausalLM(tiny())


def given(
    model: Any = None, tokenizer: Any = None, dataset: Any = None, held_out: Any = None, rewards: Any = None
) -> RunObjects:
    return read_arguments(model, tokenizer, dataset, held_out, rewards)


def resolved(config: Any, objects: RunObjects) -> ResolvedRun:
    return resolve_config(config, Path.cwd(), "python", given=objects)


def shortened(model: LlamaForCausalLM) -> LlamaForCausalLM:
    del model.model.layers[0]
    return model


def extended(model: LlamaForCausalLM) -> LlamaForCausalLM:
    model.register_buffer("counts", torch.zeros(17))
    return model


class OfParts(LlamaForCausalLM):
    """Cannot be built from its configuration alone."""

    def __init__(self, config: LlamaConfig, more: int) -> None:
        super().__init__(config)
        self.more = more


def test_objects_alone_make_a_run_and_a_stream_with_a_number_of_steps(model: LlamaForCausalLM) -> None:
    model.name_or_path = str(TOKENIZER)
    run = resolved({"train": BATCH}, given(model, None, ROWS, ROWS[:3], brevity))
    assert (run.config.model.path, run.config.data.path) == (str(TOKENIZER), "(given in Python)")
    assert run.config.evaluation is not None
    assert run.config.evaluation.path == "(given in Python)"
    assert (run.num_prompts, run.plan.prompts_per_generation) == (9, 2)
    assert run.given.model is model
    assert run.build("rewards[0]") is brevity
    assert run.config.rewards[0].label == "brevity"
    # A stream needs a number of steps.
    stream = datasets.Dataset.from_list(ROWS).to_iterable_dataset()
    config = {"model": {"path": str(TOKENIZER)}, "rewards": ["exact"], "sampling": SHORT}
    (problem,) = refused(resolved, config | {"train": BATCH}, given(dataset=stream))
    assert problem.key == "train.max_steps"
    run = resolved(config | {"train": BATCH | {"max_steps": 2}}, given(dataset=stream))
    assert (run.num_prompts, run.given.dataset) == (None, stream)


def test_facts_missing_from_an_object_come_from_the_config(model: LlamaForCausalLM) -> None:
    config = {
        "model": {"path": str(TOKENIZER), "chat_template_kwargs": {"a": 1}},
        "data": {"path": "none.jsonl", "split": "test", "prompt_column": "question"},
        "evaluation": {"path": "none.jsonl", "every": 5},
        "train": BATCH,
    }
    before = repr(config)
    run = resolved(config, given(model, None, ROWS, ROWS[:3], brevity))
    assert run.config.model.chat_template_kwargs == {"a": 1}
    assert run.config.model.path == str(TOKENIZER)  # the object does not say where it is from
    assert (run.config.data.split, run.config.data.prompt_column) == ("train", "question")
    assert run.config.evaluation is not None
    assert run.config.evaluation.every == 5
    assert repr(config) == before


def test_objects_and_paths_stand_in_for_those_of_a_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = given(dataset=ROWS * 4, rewards=[brevity, "exact"])
    run = load_run("quickstart", ["train.max_steps=3"], given=objects)
    assert (run.num_prompts, run.config.train.max_steps) == (36, 3)
    assert run.config.reward_labels == ["brevity", "exact"]
    assert run.config.model.path == str(TOKENIZER)
    monkeypatch.chdir(tmp_path)  # from which paths start
    (tmp_path / "mine.jsonl").write_text('{"prompt": "a", "answer": "b"}\n' * 2)
    run = load_run("quickstart", ["train.num_generations=128"], given=given(dataset="mine.jsonl"))
    assert (run.config.data.path, run.num_prompts) == (str(tmp_path / "mine.jsonl"), 2)
    (problem,) = refused(load_run, "quickstart", given=given(model="./none"))
    assert (problem.where, problem.key, problem.given) == ("Run()", "model.path", str(tmp_path / "none"))


def test_the_dtype_is_that_of_the_model(model: LlamaForCausalLM) -> None:
    model.name_or_path = str(TOKENIZER)
    objects = given(model.to(torch.bfloat16), None, ROWS, None, brevity)
    assert resolved({"train": BATCH}, objects).config.model.dtype == "bfloat16"
    (problem,) = refused(resolved, {"train": BATCH, "model": {"dtype": "float32"}}, objects)
    assert (problem.key, problem.given, problem.allowed) == ("model.dtype", "float32", "bfloat16")
    config = RunConfig.model_validate(
        {"model": {"path": "x"}, "data": {"path": "y"}, "rewards": ["exact"], "train": BATCH}
    )
    assert resolved(config, objects).config.model.dtype == "bfloat16"
    assert resolved({"train": BATCH, "model": {"dtype": "auto"}}, objects).config.model.dtype == "bfloat16"
    assert config.model.path == "x"


def test_functions_names_and_mappings_mix_and_keep_their_weights() -> None:
    class Judge:
        def __call__(self, completions: list[str]) -> list[float]:
            return [0.0] * len(completions)

    judge = Judge()
    rewards = [
        brevity,
        "exact",
        {"name": "regex", "pattern": "a", "weight": 0.5},
        {"function": judge, "weight": 2, "on_error": "abstain"},
        functools.partial(brevity, answer="x"),
    ]
    run = resolved(CONFIG, given(dataset=ROWS, rewards=rewards))
    assert run.config.reward_labels == ["brevity", "exact", "regex", "Judge", "brevity-2"]
    assert [reward.weight for reward in run.config.rewards] == [1, 1, 0.5, 2, 1]
    assert run.config.rewards[3].on_error == "abstain"
    assert run.build("rewards[3]") is judge
    # A function takes no parameters, and a lambda has a name.
    (problem,) = refused(resolved, CONFIG, given(dataset=ROWS, rewards=[{"function": brevity, "target": 3}]))
    assert (problem.where, problem.key) == ("Run()", "rewards[0].target")
    rewards = [lambda completions, **_: [0.0] * len(completions), {"function": lambda **_: [], "name": "mine"}]
    run = resolved(CONFIG, given(dataset=ROWS, rewards=rewards))
    assert run.config.reward_labels == ["lambda_0", "mine"]


def test_a_sequence_classification_model_is_the_component_reward_model() -> None:
    judge = LlamaForSequenceClassification(tiny(num_labels=1, pad_token_id=0))
    judge.name_or_path = str(TOKENIZER)
    rewards = [judge, {"function": judge, "batch_size": 3, "weight": 0.5}, "exact"]
    run = resolved(CONFIG, given(dataset=ROWS, rewards=rewards))
    assert run.config.reward_labels == ["reward_model", "reward_model-2", "exact"]
    assert run.config.rewards[1].weight == 0.5
    built = run.build("rewards[1]")
    assert built.config.batch_size == 3
    scores = built(prompts=["1+1=", "2+2="], completions=["2", "4"])
    tokens = AutoTokenizer.from_pretrained(TOKENIZER)(["1+1=2", "2+2=4"], return_tensors="pt")
    assert scores == pytest.approx(judge.eval()(**tokens).logits[:, 0].tolist(), abs=1e-6)


@pytest.mark.parametrize("name", ["./judge", "org/judge"])
def test_a_reward_models_path_as_a_plain_string(name: str) -> None:
    (problem,) = refused(resolved, CONFIG, given(dataset=ROWS, rewards=[name]))
    assert (problem.key, problem.nearest) == ("rewards[0]", "")
    assert problem.allowed.startswith(f"{{name: reward_model, model: {name}}}")


@pytest.mark.parametrize("name", ["rm", "./rm", "models/rm"])
def test_a_reward_models_folder_as_a_plain_string(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative one lies in the working directory, and if the run file names it in the file's folder."""
    monkeypatch.chdir(tmp_path)
    Path(name).mkdir(parents=True)
    run = tmp_path / "elsewhere" / "run.yaml"
    run.parent.mkdir()
    run.write_text(f"model: {{path: {TOKENIZER}}}\ntrain: {BATCH}\nsampling: {SHORT}\n")
    objects = given(dataset=ROWS, rewards=[{"name": name, "weight": 2}])
    cure = f"{{name: reward_model, model: {name}}}"
    (problem,) = refused(load_run, run, given=objects)
    assert (problem.where, problem.key, problem.given) == ("Run()", "rewards[0]", name)
    assert problem.nearest != cure
    Path(name, "config.json").write_text("{}")
    (problem,) = refused(load_run, run, given=objects)
    assert problem.nearest == cure
    own = tmp_path / "run.yaml"
    own.write_text(f"model: {{path: {TOKENIZER}}}\ndata: {{path: rm}}\nrewards: [{name}]\n")
    assert cure in [problem.nearest for problem in refused(load_run, own)]


@pytest.mark.parametrize(("called", "where"), [(train, "train()"), (Run, "Run()")])
@pytest.mark.parametrize("arguments", [{"model": 3}, {"rewards": [3]}, {"rewards": ["exat"]}, {"callbacks": 3}])
def test_a_problem_with_an_argument_names_what_was_called(
    called: Any, where: str, arguments: dict[str, Any]
) -> None:
    (problem,) = refused(called, CONFIG, **{"dataset": ROWS, "rewards": "exact"} | arguments)
    assert problem.where == where


def test_objects_that_no_run_can_use(model: LlamaForCausalLM) -> None:
    half = LlamaForCausalLM(tiny()).to(torch.float16)
    mixed = LlamaForCausalLM(tiny())
    mixed.lm_head.to(torch.bfloat16)
    with torch.device("meta"):
        nowhere = LlamaForCausalLM(tiny())
    sharded = LlamaForCausalLM(tiny())
    next(sharded.parameters()).ds_id = 0
    rows = datasets.Dataset.from_list(ROWS)
    unnamed = LlamaForSequenceClassification(tiny(num_labels=1, pad_token_id=0))
    cases: list[tuple[str, Any, str]] = [
        ("model", 3, "is no transformers model"),
        ("model", torch.nn.Linear(1, 1), "is no transformers model"),
        ("model", LlamaModel(tiny()), "is no language model"),
        ("model", LlamaForSequenceClassification(tiny()), "is no language model"),
        ("model", half, "its weights are in float16"),
        ("model", mixed, "its weights are in bfloat16 and float32"),
        ("model", nowhere, "its weights are spread over devices, or on none"),
        ("model", sharded, "its weights are in the shards of a run that did not end"),
        ("model", shortened(LlamaForCausalLM(tiny())), "other weights, 9 in all: model.layers.0."),
        ("model", extended(LlamaForCausalLM(tiny())), "other weights, 1 in all: counts"),
        ("model", OfParts(tiny(), 3), "cannot be built from its configuration: TypeError: "),
        ("tokenizer", "gpt2", "is no tokenizer"),
        ("data", datasets.DatasetDict({"train": rows, "test": rows}), "is several datasets or a mapping of"),
        ("data", ["a", "b"], "holds no rows"),
        ("data", 3, "holds no rows"),
        ("data", [{"prompt": object()}], "its rows do not make a table"),
        ("rewards[1]", 3, "is no reward function"),
        ("rewards[1]", None, "is no reward function"),
        ("rewards[1]", torch.nn.Linear(1, 1), "is no reward function"),
        ("rewards[1]", LlamaForCausalLM(tiny()), "is no sequence-classification model with one output"),
        ("rewards[1]", LlamaForSequenceClassification(tiny()), "is no sequence-classification model with one"),
        ("rewards[1]", unnamed, "the model does not say where it came from"),
    ]
    for key, value, what in cases:
        name = {"data": "dataset", "rewards[1]": "rewards"}.get(key, key)
        (problem,) = refused(given, **{name: [brevity, value] if name == "rewards" else value})
        assert (problem.where, problem.key) == ("Run()", key)
        assert what in problem.what
    assert given(model=model).model is model
    (problem,) = refused(load_run, "quickstart", ["evaluation=null"], given=given(rewards=[brevity, "exakt"]))
    assert (problem.where, problem.key, problem.nearest) == ("Run()", "rewards[1]", "exact")
    (problem,) = refused(load_run, "quickstart", given=given(dataset=ROWS))
    assert problem.what == "one generation batch needs 16 prompts, but the data has 9"


def test_a_model_from_nowhere_needs_a_tokenizer_and_no_arguments_of_loading(model: LlamaForCausalLM) -> None:
    (problem,) = refused(resolved, {"train": BATCH}, given(model, None, ROWS, None, brevity))
    assert (problem.key, "tokenizer=" in problem.allowed) == ("model", True)
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    run = resolved({"train": BATCH}, given(model, tokenizer, ROWS, None, brevity))
    assert run.config.model.path == "(given in Python)"
    config = {"train": BATCH, "model": {"path": str(TOKENIZER), "init": {"revision": "main"}}}
    (problem,) = refused(resolved, config, given(model, None, ROWS, None, brevity))
    assert problem.key == "model.init"


def test_a_list_of_rows_has_all_columns_and_the_format_of_a_dataset_is_set_aside() -> None:
    made = as_dataset([{"prompt": "a"}, {"prompt": "b", "answer": "x"}], "data")
    assert list(made) == [{"prompt": "a", "answer": None}, {"prompt": "b", "answer": "x"}]
    formatted = datasets.Dataset.from_dict({"prompt": ["a"], "level": [3]}).with_format("torch")
    made = as_dataset(formatted, "data")
    assert isinstance(made, datasets.Dataset)
    assert made[0] == {"prompt": "a", "level": 3}
    assert type(formatted[0]["level"]) is torch.Tensor


@pytest.mark.parametrize("rows", [0, LONGEST_STREAM + 1, LONGEST_STREAM])
def test_a_stream_of_held_out_prompts_has_rows_and_an_end(rows: int) -> None:
    stream = datasets.IterableDataset.from_generator(lambda: ({"prompt": "a"} for _ in range(rows)))
    if rows == LONGEST_STREAM:
        assert len(given(held_out=stream).eval_datasets[""]) == rows
        return
    (problem,) = refused(given, held_out={"far": stream})
    assert (problem.key, problem.given) == ("evaluation.sets.far", "IterableDataset")
    assert ("rows.take" in problem.allowed) == (rows > 0)
    broken = datasets.IterableDataset.from_generator(lambda: (1 // n for n in range(1)))
    (problem,) = refused(given, held_out=broken)
    assert (problem.where, problem.key, "by zero" in problem.what) == ("Run()", "evaluation", True)


def test_sets_and_streams_of_held_out_prompts(tmp_path: Path) -> None:
    (tmp_path / "more.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    held_out = {"easy": ROWS, "hard": datasets.Dataset.from_list(ROWS), "file": tmp_path / "more.jsonl"}
    run = load_run("quickstart", given=given(held_out=held_out))
    assert run.config.evaluation is not None
    assert run.config.evaluation.path is None
    assert run.config.evaluation.set_paths == {
        "evaluation.sets.easy.path": "(given in Python)",
        "evaluation.sets.hard.path": "(given in Python)",
        "evaluation.sets.file.path": str(tmp_path / "more.jsonl"),
    }
    assert [len(run.given.eval_datasets[name]) for name in ("easy", "hard")] == [len(ROWS)] * 2
    (problem,) = refused(given, held_out={"easy": ["a"]})
    assert (problem.key, problem.what) == ("evaluation.sets.easy", "holds no rows")
    # A stream is read to its end.
    stream = datasets.Dataset.from_list(ROWS).to_iterable_dataset()
    read = given(held_out=stream.with_format("torch")).eval_datasets[""]
    assert list(read) == ROWS
    both = given(held_out={"all": stream, "some": stream.take(2)}).eval_datasets
    assert (list(both["all"]), list(both["some"])) == (ROWS, ROWS[:2])


def test_a_run_needs_its_sections_and_objects_that_its_record_cannot_hold() -> None:
    assert [problem.key for problem in refused(train)] == ["model", "data", "rewards"]
    config: dict[str, Any] = {name: {"path": "(given in Python)"} for name in ("model", "data", "evaluation")}
    problems = refused(resolved, config | {"rewards": ["exact"]}, RunObjects())
    assert [problem.key for problem in problems] == ["model.path", "data.path", "evaluation.path"]
    assert {problem.what for problem in problems} == {"was a Python object, which a file cannot name"}


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("reward_funcs", "rewards"),
        ("train_dataset", "dataset"),
        ("args", "config, a run file"),
        ("peft_config", "model.lora, in the config"),
        ("beta", "train.beta, in the config"),
        ("loss_type", "loss, in the config"),
        ("toools", "tools"),
        ("max_step", "train.max_steps, in the config"),
    ],
)
def test_an_argument_of_trl_is_answered_with_ours(name: str, near: str) -> None:
    (problem,) = refused(train, **{name: 1})
    assert (problem.where, problem.key, problem.what) == ("train()", name, "is no argument of train()")
    assert problem.nearest.startswith(near)


@pytest.mark.parametrize(("called", "where"), [(train, "train()"), (Run, "Run()")])
@pytest.mark.parametrize(
    ("name", "cure"),
    [
        ("reward_processing_classes", "the parameter `tokenizer` of `reward_model`"),
        ("rollout_func", "an environment answers the model"),
        ("quantization_config", "all weights are trained"),
    ],
)
def test_an_argument_of_trl_without_counterpart_is_answered_with_its_cure(
    called: Any, where: str, name: str, cure: str
) -> None:
    (problem,) = refused(called, "quickstart", **{name: 1})
    assert (problem.where, problem.key, problem.nearest) == (where, name, "")
    assert problem.what.startswith(f"is no argument of {where}: ")
    assert cure in problem.what


def peft_model(base: Any, is_new: bool = False, **settings: Any) -> Any:
    """A model whose adapter changes it, as B is not 0, if it is not new."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    wrapped = peft.get_peft_model(base, peft.LoraConfig(**settings))
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name and not is_new:
                parameter.normal_()
    return wrapped.eval()


@pytest.mark.parametrize(
    ("kind", "settings", "lora"),
    [
        (
            "llama",
            {"r": 3, "lora_alpha": 12, "target_modules": ["v_proj", "q_proj"], "use_rslora": True},
            {"r": 3, "alpha": 12, "target_modules": ["q_proj", "v_proj"], "use_rslora": True},
        ),
        (
            "qwen3_moe",
            {"r": 2, "lora_alpha": 4, "target_parameters": EXPERTS},
            {"r": 2, "alpha": 4, "target_modules": [], "target_parameters": EXPERTS},
        ),
    ],
)
def test_a_peft_model_is_merged_and_gets_a_new_adapter_of_the_same_shape(
    kind: str, settings: dict[str, Any], lora: dict[str, Any]
) -> None:
    base = tiny_model(kind)
    base.name_or_path = str(TOKENIZER)
    wrapped = peft_model(base, **settings, lora_dropout=0.1 if kind == "llama" else 0.0)
    tokens = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        before = wrapped(tokens).logits
    objects = given(wrapped, dataset=ROWS, rewards=["exact"])
    assert objects.model is base
    assert list(objects.fingerprints) == [MERGED]
    with torch.no_grad():
        assert torch.allclose(base(tokens).logits, before, atol=1e-6 if kind == "llama" else 1e-5)
    made = resolved({"train": BATCH}, objects).config.model.lora
    assert made is not None
    assert made.model_dump(include=set(lora)) == lora
    # An adapter that is new changes no weight of the folder.
    fresh = peft_model(tiny_model(kind), **settings, is_new=True)
    fresh.base_model.model.name_or_path = str(TOKENIZER)
    assert given(fresh, dataset=ROWS, rewards=["exact"]).fingerprints == {}


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"use_dora": True}, "use_dora=True"),
        ({"bias": "all"}, "bias=all"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save=['lm_head']"),
        ({"target_modules": ".*q_proj"}, "target_modules=.*q_proj"),
        # A pattern of whole names: in peft it leaves out nothing here, at the end of names it would.
        ({"exclude_modules": "v_proj", "target_modules": ["q_proj", "v_proj"]}, "exclude_modules=v_proj"),
        ({"lora_bias": True}, "lora_bias=True"),
        ({"layers_to_transform": 0}, "layers_to_transform=0"),
        ({"alora_invocation_tokens": [3], "task_type": "CAUSAL_LM"}, "alora_invocation_tokens=[3]"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern={'q_proj': 2}"),
        ({"init_lora_weights": "gaussian"}, "init_lora_weights=gaussian"),
    ],
)
def test_an_adapter_that_the_run_file_cannot_describe(settings: dict[str, Any], told: str) -> None:
    wrapped = peft_model(LlamaForCausalLM(tiny()), **{"target_modules": ["q_proj"]} | settings)
    (problem,) = refused(given, wrapped)
    assert (problem.key, problem.given) == ("model", type(wrapped).__name__)
    assert told in problem.what


def test_each_setting_of_peft_is_in_the_run_file_or_without_effect_or_refused() -> None:
    """A setting that a new peft brings is refused until it is sorted here."""
    peft = pytest.importorskip("peft")
    refused_ones = {
        *("bias", "modules_to_save", "init_lora_weights", "layers_to_transform", "layers_pattern"),
        *("rank_pattern", "alpha_pattern", "megatron_config", "trainable_token_indices", "use_dora"),
        *("velora_config", "alora_invocation_tokens", "use_qalora", "monteclora_config", "layer_replication"),
        *("lora_bias", "use_bdlora", "arrow_config", "kasa_config"),
    }
    known = set(settings_of_adapters._OF_LORA) | set(settings_of_adapters._WITHOUT_EFFECT)
    assert known.isdisjoint(refused_ones)
    assert set(peft.LoraConfig().to_dict()) == known | refused_ones
    # An adapter of another kind is named.
    peft = pytest.importorskip("peft")
    settings = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    (problem,) = refused(given, model=peft.get_peft_model(LlamaForCausalLM(tiny()), settings))
    assert problem.key == "model"
    assert "PROMPT_TUNING" in problem.what


def test_a_reward_model_with_an_adapter_is_merged_or_refused() -> None:
    base = LlamaForSequenceClassification(tiny(num_labels=1, pad_token_id=0))
    base.name_or_path = str(TOKENIZER)
    wrapped = peft_model(base, target_modules=["q_proj"], task_type="SEQ_CLS")
    tokens = AutoTokenizer.from_pretrained(TOKENIZER)(["1+1=2"], return_tensors="pt")
    with torch.no_grad():
        [[score]] = wrapped(**tokens).logits.tolist()
    objects = given(dataset=ROWS, rewards=wrapped)
    run = resolved(CONFIG, objects)
    assert run.build("rewards[0]")(prompts=["1+1="], completions=["2"]) == pytest.approx([score], abs=1e-6)
    # The record does not name the base model's folder, whose weights are others.
    assert run.config.rewards[0].params == {"model": GIVEN, "tokenizer": str(TOKENIZER)}
    assert len(objects.fingerprints["rewards[0]'s merged adapter"]) == 64
    wrapped = peft_model(base, target_modules=["q_proj"], task_type="SEQ_CLS", lora_bias=True)
    (problem,) = refused(given, dataset=ROWS, rewards=[brevity, wrapped])
    assert (problem.key, problem.given) == ("rewards[1]", type(wrapped).__name__)
