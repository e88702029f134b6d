"""Loading a model: what a checkpoint must hold, what `model.init` passes on, and a hub that does not answer."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.logs import LOGGED
from support.problems import problem_of
from support.sampling_parity import MODEL
from torch import Tensor

from grpox.config import ModelConfig
from grpox.policy import models
from grpox.policy.models import architecture_of, load_model, load_tokenizer

NORM, UP = "model.norm.weight", "model.layers.1.mlp.up_proj.weight"
TIED = "model.embed_tokens.weight"


@pytest.fixture
def changed(tmp_path: Path) -> Callable[..., ModelConfig]:
    """The quickstart's model with other weights in its checkpoint."""

    def change(edit: Callable[[dict[str, Tensor]], object]) -> ModelConfig:
        folder = tmp_path / "model"
        shutil.copytree(MODEL, folder)
        weights = load_file(folder / "model.safetensors")
        edit(weights)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return ModelConfig(path=str(folder))

    return change


def told_beside_the_bar(capfd: pytest.CaptureFixture[str]) -> list[str]:
    """The lines on standard error that are not of transformers' progress bar."""
    told = LOGGED() + capfd.readouterr().err
    return [line for line in told.splitlines() if line and "Loading weights" not in line]


def test_an_adapter_beside_a_model_that_is_trained_is_refused(changed: Callable[..., ModelConfig]) -> None:
    peft = pytest.importorskip("peft")
    config = changed(lambda weights: None)
    plain = load_model(config)
    peft.get_peft_model(plain, peft.LoraConfig(target_modules=["q_proj"])).save_pretrained(config.path)
    assert "an adapter beside the model" in problem_of(load_model, config, trains=True).what


def test_every_weight_comes_from_the_checkpoint_which_has_tied_embeddings_once() -> None:
    model = load_model(ModelConfig(path=str(MODEL)))
    stored = load_file(MODEL / "model.safetensors")
    assert dict(model.named_parameters()).keys() == stored.keys()
    assert all(torch.equal(weight, stored[name]) for name, weight in model.named_parameters())
    assert "lm_head.weight" not in stored
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (
            lambda weights: (weights.pop(NORM), weights.pop(UP)),
            f"missing in the checkpoint, 2 in all: {UP}, {NORM}",
        ),
        (lambda weights: weights.pop(TIED), f"missing in the checkpoint, 2 in all: lm_head.weight, {TIED}"),
        (
            lambda weights: weights.update({UP: torch.zeros(3, 128)}),
            f"with another shape, 1 in all: {UP} is [3, 128], not [512, 128]",
        ),
    ],
    ids=["missing", "tied and stored nowhere", "another shape"],
)
def test_weights_that_do_not_fit_are_named_by_the_error_alone(
    changed: Callable[..., ModelConfig],
    capfd: pytest.CaptureFixture[str],
    edit: Callable[[dict[str, Tensor]], object],
    told: str,
) -> None:
    problem = problem_of(load_model, changed(edit))
    assert (problem.key, problem.what) == ("model.path", f"weights {told}")
    assert TIED in told or told_beside_the_bar(capfd) == []  # of tied ones transformers tells too


def test_only_the_first_few_of_many_are_named(changed: Callable[..., ModelConfig]) -> None:
    of_layer = changed(lambda weights: [weights.pop(name) for name in list(weights) if "layers.0" in name])
    what = problem_of(load_model, of_layer).what
    assert what.startswith("weights missing in the checkpoint, 9 in all: ")
    assert (what.count("layers.0"), what.endswith(", ...")) == (3, True)


@pytest.mark.parametrize(
    "name",
    ["vision_tower.blocks.0.weight", "model.visual.merger.weight", "multi_modal_projector.linear.weight"],
)
def test_towers_of_images_that_the_config_does_not_use_are_no_mere_warning(
    changed: Callable[..., ModelConfig], name: str
) -> None:
    config = changed(lambda weights: weights.update({name: torch.ones(2)}))
    problem = problem_of(load_model, config, trains=True)
    assert problem.key == "model.path"
    assert f"1 weights in all: {name}" in problem.what
    load_model(config)  # where nothing is saved, nothing is lost


def test_weights_that_nothing_uses_are_told_in_one_line(
    changed: Callable[..., ModelConfig], capfd: pytest.CaptureFixture[str]
) -> None:
    load_model(changed(lambda weights: weights.update({"model.layers.9.extra": torch.ones(2)})))
    [line] = told_beside_the_bar(capfd)
    assert "does not use" in line
    assert line.endswith("1 in all: model.layers.9.extra")
    assert line.isprintable()


def test_the_attention_chosen_is_that_of_the_model_and_its_copies() -> None:
    model = load_model(ModelConfig(path=str(MODEL), init={"attn_implementation": "eager"}))
    assert model.config._attn_implementation == "eager"
    assert architecture_of(model)().config._attn_implementation == "eager"
    assert load_model(ModelConfig(path=str(MODEL))).config._attn_implementation == "sdpa"


def test_an_unknown_attention_and_an_unknown_argument_are_refused() -> None:
    config = ModelConfig(path=str(MODEL), init={"attn_implementation": "flash_atention"})
    problem = problem_of(load_model, config)
    assert (problem.key, problem.given) == ("model.init.attn_implementation", "flash_atention")
    assert "sdpa" in problem.what
    problem = problem_of(load_model, ModelConfig(path=str(MODEL), init={"revison": "main"}))
    assert problem.key == "model.init"
    assert "'revison'" in problem.what


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A hub whose port nobody listens on."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(models, "_ask_hub", models._ask_hub.__wrapped__)


@pytest.mark.parametrize("load", [load_model, load_tokenizer])
@pytest.mark.usefixtures("no_hub")
def test_a_hub_that_does_not_answer_is_told_once_and_in_one_line(
    load: Callable[[ModelConfig], object], capfd: pytest.CaptureFixture[str]
) -> None:
    problem = problem_of(load, ModelConfig(path="org/name"))
    for fact in ("not a local folder", "hub", "ConnectError: "):
        assert fact in problem.what
    assert "\n" not in problem.what
    assert capfd.readouterr().err == ""


@pytest.mark.usefixtures("no_hub")
def test_without_the_hub_its_cache_and_folders_serve(tmp_path: Path) -> None:
    """In the layout of huggingface_hub's cache: a snapshot of each commit, and the commit of each branch."""
    cached = tmp_path / "models--org--name"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0123abcd")
    shutil.copytree(MODEL, cached / "snapshots" / "0123abcd")
    config = ModelConfig(path="org/name", init={"cache_dir": str(tmp_path)})
    assert load_model(config).num_parameters() == 527_104
    assert load_tokenizer(config).pad_token_id is not None
    assert models.model_location(config) == str(cached / "snapshots" / "0123abcd")
    assert models.model_location(ModelConfig(path=str(MODEL))) == str(MODEL)  # a folder needs none
