"""The date that a chat template writes: fixed when a run begins, and kept by a resume and an evaluation."""

from __future__ import annotations

import datetime
import json
import shutil
from importlib import resources
from pathlib import Path

import pytest
import torch
from support.chat_templates import byte_tokenizer
from transformers import AutoModelForCausalLM

from grpox.cli.init_files import RunDraft
from grpox.data.chat import PLAIN, ChatTemplate
from grpox.errors import ConfigError
from grpox.observing.record import recorded_choices
from grpox.runfile.load import ResolvedRun, load_run
from grpox.runtime.world import World
from grpox.training import inputs
from grpox.training.load_evaluation import load_evaluation, named_model

ALONE = World(0, 1, torch.device("cpu"))
FIRST, LATER = datetime.date(2026, 1, 1), datetime.date(2026, 1, 2)
TODAY = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}{{ strftime_now('%d %B %Y') }}"
LLAMA3_1 = "{{ date_string | default('26 Jul 2024') }}"
QUESTION = [{"role": "user", "content": "a"}]


def model(folder: Path, template: str | None) -> str:
    """The quickstart's model with a tokenizer of bytes and this template."""
    shutil.copytree(resources.files("grpox.runfile.recipes") / "quickstart" / "model", folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    tokenizer, policy = byte_tokenizer(template), AutoModelForCausalLM.from_pretrained(folder)
    policy.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    policy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return f"model.path={folder}"


def opened(run: ResolvedRun, monkeypatch: pytest.MonkeyPatch, today: datetime.date, **settings: object) -> str:
    """Return what the template writes on a day."""
    day = type("Day", (datetime.date,), {"today": classmethod(lambda kind: today)})
    monkeypatch.setattr(inputs, "date", day)
    chat = ChatTemplate(inputs.open_tokenizer(run, ALONE, **settings), run.config.model.chat_template_kwargs)
    chat.set_day(run.config.model.chat_date)
    return chat.render(QUESTION, header=False)


def test_a_run_keeps_the_day_on_which_it_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = [model(tmp_path / "model", TODAY), f"output_dir={tmp_path / 'run'}"]
    run = load_run("quickstart", changes)
    assert opened(run, monkeypatch, FIRST).endswith("01 January 2026")
    assert run.config.model.chat_date == FIRST
    (tmp_path / "run").mkdir()
    record = tmp_path / "run" / "config.yaml"
    record.write_text(json.dumps(run.config.model_dump(mode="json")))
    day = recorded_choices(tmp_path / "run")["model.chat_date"]
    assert opened(load_run("quickstart", changes), monkeypatch, LATER, day=day).endswith("01 January 2026")
    assert load_run(record, []).config.model.chat_date == FIRST
    for given, further, expected in (
        ("run", [], FIRST),
        ("run", ["model.chat_date=2020-02-29"], datetime.date(2020, 2, 29)),
        ("model", [], "auto"),
    ):
        named = named_model(str(tmp_path / given))
        evaluated = load_evaluation(named, "quickstart", [*changes[:1], *further])
        assert evaluated.config.model.chat_date == expected


def test_a_run_from_before_the_date_was_recorded_has_that_of_its_beginning(tmp_path: Path) -> None:
    started = datetime.datetime(2026, 1, 1, 12).timestamp()
    (tmp_path / "config.yaml").write_text("model: {dtype: float32}")
    (tmp_path / "versions.json").write_text(json.dumps({"started": started}))
    assert recorded_choices(tmp_path) == {"model.dtype": "float32", "started": FIRST}
    (tmp_path / "config.yaml").write_text("model: {chat_date: yesterday}")
    assert recorded_choices(tmp_path) == {"started": FIRST}


def test_a_template_without_todays_date_needs_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change = model(tmp_path / "model", LLAMA3_1)
    run = load_run("quickstart", [change])
    assert opened(run, monkeypatch, FIRST) == "26 Jul 2024"
    assert run.config.model.chat_date == "auto"
    run = load_run("quickstart", [change, "model.chat_date=2026-01-02"])
    assert opened(run, monkeypatch, FIRST) == "02 Jan 2026"


@pytest.mark.parametrize("given", ["heute", "2026-13-01", "12.5.2026", "true"])
def test_what_is_no_date_is_refused(given: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_run("quickstart", [f"model.chat_date={given}"])
    assert caught.value.problems[0].key == "model.chat_date"


def test_plain_prompts_of_a_chat_model_are_told_unless_the_run_file_decides(tmp_path: Path) -> None:
    chat, plain = (model(tmp_path / name, template) for name, template in (("chat", TODAY), ("plain", None)))
    messages, rendered = tmp_path / "messages.jsonl", tmp_path / "rendered.csv"
    messages.write_text((json.dumps({"prompt": QUESTION, "answer": "a"}) + "\n") * 64)
    rendered.write_text("prompt,answer\n" + "<|im_start|>a<|im_end|>,a\n" * 64)
    assert PLAIN in load_run("quickstart", [chat]).warnings
    for changes in (
        [plain],
        [chat, "data.chat=true"],
        [chat, "data.chat=false"],
        [chat, f"data.path={messages}"],
        [chat, f"data.path={rendered}"],
    ):
        assert PLAIN not in load_run("quickstart", changes).warnings, changes


@pytest.mark.parametrize(("template", "is_plain"), [(TODAY, True), (None, False)])
def test_init_asks_whether_the_template_is_applied(
    tmp_path: Path, template: str | None, is_plain: bool
) -> None:
    model(tmp_path / "model", template)
    draft = RunDraft(tmp_path / "run", model=str(tmp_path / "model"), data="example", reward="own")
    assert draft.is_plain == is_plain
    draft.chat = "yes" if is_plain else ""
    draft.write()
    assert load_run(str(draft.run_file)).config.data.chat == is_plain
