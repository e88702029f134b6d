"""Saving a model: the folder appears whole, and what stood in its place is kept."""

import resource
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

from grpox.checkpoint.save_model import save_model
from grpox.errors import RunFailed
from grpox.runtime.world import World

TOKENIZER = Path(__file__).parents[3] / "grpox" / "runfile" / "recipes" / "quickstart" / "model"
ALONE = World(rank=0, size=1, device=torch.device("cpu"))


@pytest.fixture
def model():
    sizes = {"vocab_size": 17, "hidden_size": 8, "intermediate_size": 8}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2))


def save(model, folder, world=ALONE, **changes):
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()} | changes
    engine = SimpleNamespace(weights=lambda: iter(weights.items()), module=model)
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    save_model(engine, tokenizer, GenerationConfig(eos_token_id=[1, 5]), folder, world)


def test_the_folder_holds_the_engines_weights_the_tokenizer_and_the_end_tokens(model, tmp_path):
    whole = torch.full((17, 8), 0.5)
    save(model, tmp_path / "model", **{"lm_head.weight": whole})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert torch.equal(loaded.lm_head.weight, whole)
    assert torch.equal(loaded.model.norm.weight, model.model.norm.weight)
    assert loaded.generation_config.eos_token_id == [1, 5]
    assert AutoTokenizer.from_pretrained(tmp_path / "model")("1+1=")["input_ids"]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_stood_in_its_place_is_moved_aside_each_time(model, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.txt").write_text("kept")
    save(model, tmp_path / "model")
    (first,) = (tmp_path / "earlier").iterdir()
    assert (first / "mine.txt").read_text() == "kept"
    save(model, tmp_path / "model")
    assert len(list((tmp_path / "earlier").iterdir())) == 2
    assert (first / "mine.txt").read_text() == "kept"
    assert not (tmp_path / "model" / "mine.txt").exists()
    (tmp_path / "file").write_text("a file")
    save(model, tmp_path / "file")
    assert "a file" in [path.read_text() for path in (tmp_path / "earlier").glob("file*")]


def test_what_an_interrupted_save_left_is_no_part_of_the_next(model, tmp_path):
    (tmp_path / "model.unfinished").mkdir()
    (tmp_path / "model.unfinished" / "old.safetensors").write_text("")
    save(model, tmp_path / "model")
    assert not (tmp_path / "model" / "old.safetensors").exists()
    assert not (tmp_path / "model.unfinished").exists()


def test_other_ranks_write_nothing(model, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.distributed.all_gather_object", lambda parts, mine: None)
    save(model, tmp_path / "model", World(rank=1, size=2, device=torch.device("cpu")))
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_does_not_fit_leaves_the_one_before(model, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.txt").write_text("kept")
    (tmp_path / "checkpoints" / "step-00000007").mkdir(parents=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(RunFailed) as failed:
            save(model, tmp_path / "model")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    told = str(failed.value)
    assert f"{tmp_path / 'model'} cannot be written: File too large" in told
    assert "free, about" in told
    assert "step-00000007" in told
    assert (tmp_path / "model" / "mine.txt").read_text() == "kept"
    assert {path.name for path in tmp_path.iterdir()} == {"model", "checkpoints"}
