"""A checkpoint becomes a plain Hugging Face folder with exactly the weights that were trained."""

from __future__ import annotations

import importlib.resources
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from support.fixtures import GrpoxCommand
from support.logs import LoggedText
from support.run_files import SHORT
from support.small_models import model_of
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from grpox.checkpoint.export import export_checkpoint
from grpox.errors import ConfigError

QUICKSTART = importlib.resources.files("grpox.runfile.recipes") / "quickstart" / "model"
SETTINGS = ("train.max_steps=2", "checkpoint.every=1", "train.per_device_train_batch_size=32", *SHORT)
REWARD = "def kinds(completions, **_): return [len(set(c)) for c in completions]"
LEARNS = ("rewards=[{path: rewards.py:kinds}]", "train.learning_rate=0.01", "train.warmup_steps=0")
"""So that even a random model, in bfloat16, is another one after two steps."""


@dataclass(frozen=True)
class Finished:
    """A run that has ended, and the dtype that it trained in."""

    folder: Path
    model: Path
    dtype: torch.dtype


def untied_model(folder: Path) -> Path:
    """A Llama whose head is not its embedding, with a generation config of its own."""
    tokenizer = AutoTokenizer.from_pretrained(str(QUICKSTART))
    own = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    model = model_of("llama", torch.float32, tie_word_embeddings=False, **own)
    model.generation_config = GenerationConfig(max_new_tokens=3, eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["tied float32", "untied bfloat16 on two ranks"])
def finished(request: pytest.FixtureRequest, grpox: GrpoxCommand, folder: Path) -> Finished:
    if request.param == "tied float32":
        done = grpox("train", "quickstart", *SETTINGS, "output_dir=runs/tied")
        run = Finished(folder / "runs" / "tied", Path(str(QUICKSTART)), torch.float32)
    else:
        model = untied_model(folder / "untied")
        (folder / "rewards.py").write_text(REWARD)
        settings = (f"model.path={model}", "model.dtype=bfloat16", "output_dir=runs/untied", *LEARNS)
        done = grpox("train", "quickstart", *SETTINGS, *settings, ranks=2)
        run = Finished(folder / "runs" / "untied", model, torch.bfloat16)
    assert done.returncode == 0, done.stderr
    return run


def weights(folder: Path) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype="auto")
    return dict(model.state_dict())


def test_the_model_is_the_one_that_the_run_itself_saved(finished: Finished, tmp_path: Path) -> None:
    assert export_checkpoint(finished.folder, tmp_path / "out").name == "step-00000002"
    found, saved, base = (
        weights(path) for path in (tmp_path / "out", finished.folder / "model", finished.model)
    )
    assert found.keys() == saved.keys() == base.keys()
    for name, weight in saved.items():
        assert weight.dtype == found[name].dtype == finished.dtype
        assert torch.equal(weight, found[name]), name
    assert not torch.equal(found["lm_head.weight"], base["lm_head.weight"].to(finished.dtype))  # it was trained
    for path in (finished.folder / "model").iterdir():
        if path.name == "README.md":  # of the checkpoint it says less: not how the run ended
            assert "| optimizer steps | 2 |" in (tmp_path / "out" / "README.md").read_text()
            continue
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes(), path.name


def test_a_checkpoint_that_is_named_is_taken(finished: Finished, tmp_path: Path) -> None:
    first = finished.folder / "checkpoints" / "step-00000001"
    assert export_checkpoint(first, tmp_path / "out") == first
    names = weights(tmp_path / "out").items()
    assert any(not torch.equal(weight, weights(finished.folder / "model")[name]) for name, weight in names)


@pytest.fixture
def copied(finished: Finished, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished.folder, tmp_path / "run"))


def refused(source: Path, out: Path) -> str:
    there = sorted(out.iterdir()) if out.is_dir() else []
    with pytest.raises(ConfigError) as caught:
        export_checkpoint(source, out)
    assert (sorted(out.iterdir()) if out.is_dir() else []) == there
    return "\n".join(map(str, caught.value.problems))


def test_a_damaged_checkpoint_is_refused_and_the_one_before_it_taken_for_the_run(
    copied: Path, tmp_path: Path, logged: LoggedText
) -> None:
    newest = copied / "checkpoints" / "step-00000002"
    shards = sorted(newest.glob("engine/*optim_states.pt"))[0]
    content = bytearray(shards.read_bytes())
    content[len(content) // 2] ^= 1
    shards.write_bytes(content)
    told = refused(newest, tmp_path / "out")
    assert "is damaged" in told
    assert shards.name in told
    assert export_checkpoint(copied, tmp_path / "out").name == "step-00000001"
    assert "step-00000002 is damaged and passed over" in logged()


def test_what_cannot_be_exported_is_told(copied: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("")
    assert "OUT_DIR: is not empty" in refused(copied, tmp_path / "full")
    assert "OUT_DIR: is a file" in refused(copied, tmp_path / "full" / "mine.txt")
    assert "no such folder" in refused(tmp_path / "rnu", tmp_path / "out")
    assert str(copied) in refused(tmp_path / "rnu", tmp_path / "out")
    shutil.rmtree(copied / "checkpoints")
    assert "neither a checkpoint nor a run" in refused(copied, tmp_path / "out")


def test_a_run_whose_model_is_gone_is_told(grpox: GrpoxCommand, finished: Finished, folder: Path) -> None:
    if finished.dtype != torch.bfloat16:
        pytest.skip("the quickstart's model stays where it is")
    finished.model.rename(finished.model.with_name("elsewhere"))
    done = grpox("export", str(finished.folder), "out")
    finished.model.with_name("elsewhere").rename(finished.model)
    assert done.returncode == 2
    assert "the run's model is gone" in done.stderr
    assert str(finished.model) in done.stderr
    assert "Traceback" not in done.stderr
    assert not (folder / "out").exists()
