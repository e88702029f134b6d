"""Models and rows with images, sounds or videos: refused before a model is loaded, as only text is trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from support.architectures import tiny_model
from support.problems import problem_of
from support.run_checks import Runs
from support.sampling_parity import MODEL
from transformers import AutoTokenizer, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from grpox.data.prompts import PromptSet
from grpox.data.row_stream import RowStream
from grpox.data.unusable_columns import media_part
from grpox.errors import RunFailed
from grpox.runfile.load import load_run
from grpox.runfile.model_options import media_parts, media_problem
from grpox.training.arguments import read_arguments
from grpox.training.inputs import open_prompts, open_tokenizer
from grpox.training.load_evaluation import NamedModel, load_evaluation


def messages(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts]}]


TEXT = {"type": "text", "text": "1+1="}
IMAGE_URL = {"type": "image_url", "image_url": {"url": "file:///a.png"}}
ROW = {"prompt": "1+1=", "answer": "2"}


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    return Runs(tmp_path)


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("llava", ["vision_config"]),
        ("voxtral", ["audio_config"]),
        ("chameleon", ["vq_config"]),
        ("qwen2_5_omni", ["thinker_config.audio_config", "thinker_config.vision_config"]),
    ],
)
def test_a_multimodal_model_is_refused_with_its_parts(kind: str, parts: list[str]) -> None:
    problem = media_problem(CONFIG_MAPPING[kind]().to_dict(), "model.path", "m")
    assert problem is not None
    assert problem.key == "model.path"
    assert all(part in problem.what for part in parts)
    assert "a text model" in problem.allowed


def test_a_model_of_text_has_no_such_part() -> None:
    for kind in ("llama", "qwen3_5_text", "gemma3n_text", "gemma4_text", "gpt_oss", "deepseek_v3", "bart"):
        assert list(media_parts(CONFIG_MAPPING[kind]().to_dict())) == [], kind
    none: dict[str, Any] = {"vision_config": None, "audio_config": {}, "text_config": {"a": {"b": 1}}}
    assert list(media_parts(none)) == []


def test_a_model_of_the_hub_or_of_python_is_refused_once_its_config_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = load_run("quickstart")
    tokenizer = open_tokenizer(run)
    config: PreTrainedConfig = CONFIG_MAPPING["qwen2_5_vl"]()
    monkeypatch.setattr("grpox.training.inputs.load_config", lambda model: config)
    assert "vision_config" in problem_of(open_prompts, run, tokenizer).what
    model = tiny_model("llama")
    model.config.vision_config = {"depth": 2}
    assert "vision_config" in problem_of(read_arguments, model, None, None, None, None).what


def test_an_evaluation_loses_nothing_and_takes_such_a_model(tmp_path: Path) -> None:
    (tmp_path / "vlm").mkdir()
    (tmp_path / "vlm" / "config.json").write_text(json.dumps(CONFIG_MAPPING["gemma3"]().to_dict()))
    (tmp_path / "held-out.jsonl").write_text(json.dumps(ROW) + "\n")
    (tmp_path / "run.yaml").write_text("evaluation: {path: held-out.jsonl}\nrewards: [exact]\n")
    named = NamedModel("vlm", {"path": str(tmp_path / "vlm")})
    assert load_evaluation(named, tmp_path / "run.yaml").config.model.path == str(tmp_path / "vlm")


@pytest.mark.parametrize("column", ["image", "images", "Audio", "videos"])
def test_a_column_of_images_or_the_like_is_refused(runs: Runs, column: str) -> None:
    [problem] = runs.refused(rows=[ROW | {column: "a.png"}] * 8)
    assert (problem.key, problem.given) == ("data.path", column)
    assert "grpox cannot read" in problem.what


@pytest.mark.parametrize(
    ("suffix", "place"), [("jsonl", "line 2"), ("json", "record 1 (from 0)"), ("parquet", "row 1 (from 0)")]
)
def test_a_part_of_a_message_that_is_no_text_is_refused_with_its_row(
    runs: Runs, suffix: str, place: str
) -> None:
    rows = [ROW | {"prompt": messages(TEXT)}, ROW | {"prompt": messages(TEXT, {"type": "image"})}]
    if suffix == "parquet":
        datasets.Dataset.from_list(rows).to_parquet(runs.folder / "a.parquet")
    else:
        (runs.folder / "a.json").write_text(json.dumps(rows))
    data = None if suffix == "jsonl" else {"path": f"a.{suffix}"}
    [problem] = runs.refused(data, rows * 4)
    assert problem.what == f"{place} has a part of type image, but grpox reads only text"


def test_text_messages_of_any_form_are_accepted(runs: Runs) -> None:
    forms = [messages(TEXT), [{"role": "user", "content": "an image"}]] * 4
    assert runs.resolve(rows=[ROW | {"prompt": form} for form in forms])


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        (TEXT, ""),
        ("an image", ""),
        (TEXT | {"image": None}, ""),  # as arrow fills up parts of different keys
        ({"text": "1+1="}, ""),
        (IMAGE_URL, "image_url"),
        ({"type": "input_audio", "input_audio": {"data": ""}}, "input_audio"),
        ({"type": "video", "video": "a.mp4"}, "video"),
        ({"image": "a.png"}, "image"),
    ],
)
def test_parts_are_distinguished_by_their_type(part: dict[str, Any], kind: str) -> None:
    assert media_part(messages(TEXT, part)) == kind
    assert media_part([{"role": "user", "content": part}]) == kind
    beside = {"role": "user", "content": "1+1=", "images": ["a.png"]}
    assert media_part([beside]) == "images"
    assert media_part([beside | {"images": None, "video": []}]) == ""


def test_rows_that_no_file_showed_before_are_refused_when_they_are_read() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    for rows, told in (
        ([{"prompt": messages(TEXT, IMAGE_URL)}], "row 0 (from 0) of the data has a part of type image_url"),
        ([ROW | {"images": ["a.png"]}], "has a column that is not text"),
    ):
        assert told in problem_of(PromptSet, datasets.Dataset.from_list(rows), "prompt", tokenizer).what
    tokenizer.chat_template = "{{ messages[0].content }}"
    rows = datasets.Dataset.from_list([{"prompt": messages(TEXT)}, {"prompt": messages(IMAGE_URL)}])
    stream = RowStream(rows.to_iterable_dataset(), shuffle=False, seed=0)
    prompts = PromptSet(stream, "prompt", tokenizer)
    stream.hold(range(2))
    with pytest.raises(RunFailed, match=r"row 1 .* has a part of type image_url"):
        prompts.check([1])
