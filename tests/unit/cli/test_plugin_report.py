"""`grpox plugins list` and `show` tell all that is installed; `check` tells an object's kind and outcome."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.golden import printed
from support.problems import problem_of
from typer.testing import CliRunner

from grpox.cli.plugin_check import check_path
from grpox.cli.plugin_tables import Columns, as_table, details, rows, select
from grpox.cli.plugins import app
from grpox.errors import ConfigError
from grpox.plugins.component import kind_of
from grpox.plugins.discovery import PluginSet, discover
from grpox.plugins.load_object import load_object

SOURCE = """
from pydantic import BaseModel, ConfigDict, Field
from grpox import ComponentSpec, hookimpl

class Config(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)
    cap: float = Field(2.0, gt=0)
    '''Largest weight,
    [bold]whatever[/bold] the ratio.'''
    level: str
    seeds: list[int] = Field(default_factory=list)

@hookimpl
def grpox_losses():
    return [
        ComponentSpec("same", "grpox_foo:Loss", summary="[red]Offered[/red] here"),
        ComponentSpec("capped", "grpox_foo:Loss", config="grpox_foo:Config", needs=("entropy",),
                      formula="-min(w, cap) A", source="A paper, eq. 8", requires=("nothing-such>=1",)),
    ]

@hookimpl
def grpox_corrections():
    return [ComponentSpec("capped", "grpox_foo:Correction", config="grpox_foo:Missing", api=99)]

@hookimpl
def grpox_run_finished(run, summary): ...
"""

OTHER = """
from grpox import ComponentSpec, hookimpl

@hookimpl
def grpox_losses():
    return [ComponentSpec("same", "grpox_other:Loss")]
"""


@pytest.fixture
def plugins(make_distribution) -> PluginSet:
    make_distribution("grpox-off", "")
    make_distribution("grpox-bad", "raise ValueError('[bold]no[/bold]')")
    make_distribution("grpox-other", OTHER)
    make_distribution("grpox-foo", SOURCE)
    found = discover(disable=["grpox-off"])
    mine = ("grpox-off", "grpox-bad", "grpox-other", "grpox-foo")
    return PluginSet(
        [record for record in found.records if record.distribution in mine],
        [offer for offer in found.offers if offer.distribution in mine],
        found.manager,
    )


def said(plugins: PluginSet) -> dict[tuple[str, str], Columns]:
    return {(f"{row['kind']} {row['name']}", row["distribution"]): row for row in rows(plugins)}


def only(distribution: str) -> Columns:
    (row,) = (row for row in rows(discover()) if row["distribution"] == distribution)
    return row


def test_every_component_and_every_plugin_that_failed_or_acts_unasked_has_a_row(plugins):
    listed = [(row["kind"], row["name"], row["distribution"], row["status"]) for row in rows(plugins)]
    assert listed[:4] == [
        ("loss", "capped", "grpox-foo", "unavailable"),
        ("loss", "same", "grpox-foo", "conflict"),
        ("loss", "same", "grpox-other", "conflict"),
        ("correction", "capped", "grpox-foo", "incompatible"),
    ]
    assert set(listed[4:]) == {
        ("plugin", "plugin", "grpox-off", "disabled"),
        ("plugin", "plugin", "grpox-bad", "broken"),
        ("plugin", "plugin", "grpox-foo", "ok"),
    }
    assert said(plugins)["plugin plugin", "grpox-foo"]["summary"] == "observes every run: grpox_run_finished"
    assert {row["kind"] for row in rows(plugins, "loss")} == {"loss"}
    assert len(rows(plugins, "plugin")) == 3
    with pytest.raises(ConfigError) as caught:
        rows(plugins, "los")
    assert caught.value.problems[0].nearest == "loss"


def test_texts_of_plugins_are_no_markup_and_show_survives_a_config_that_cannot_be_imported(plugins):
    (same,) = select(plugins, "grpox-foo:same")
    shown = printed(details(plugins, same))
    assert "[red]Offered[/red] here" in shown
    assert "no parameters" in shown
    (correction,) = select(plugins, "correction/capped")
    assert "parameters unknown" in printed(details(plugins, correction))


def test_show_gives_parameters_with_type_default_and_doc(plugins):
    (loss, _) = select(plugins, "capped")
    lines = [line.strip() for line in printed(details(plugins, loss)).splitlines() if line.strip()]
    facts = {line.split()[0]: " ".join(line.split()[1:]) for line in lines}
    assert "number > 0; default 2.0" in facts["cap"]
    doc = lines[next(place for place, line in enumerate(lines) if line.startswith("cap ")) + 1]
    assert "Largest weight, [bold]whatever[/bold] the ratio." in doc
    assert "required" in facts["level"]
    assert "[]" in facts["seeds"]
    assert (facts["formula"], facts["source"]) == ("-min(w, cap) A", "A paper, eq. 8")
    assert (facts["needs"], facts["provides"]) == ("entropy", "nothing")
    assert (facts["requires"], facts["config"]) == ("nothing-such>=1", "grpox_foo:Config")


def test_the_spellings_that_show_accepts(plugins):
    for name, found in {
        "capped": {("loss", "grpox-foo"), ("correction", "grpox-foo")},
        "loss/capped": {("loss", "grpox-foo")},
        "Grpox_Other:same": {("loss", "grpox-other")},
        "loss/grpox-foo:same": {("loss", "grpox-foo")},
    }.items():
        assert {(offer.kind, offer.distribution) for offer in select(plugins, name)} == found


@pytest.mark.parametrize(("name", "near"), [("CAP", "capped"), ("loss/sam", "loss/same"), ("zzz", "")])
def test_an_unknown_name_is_refused_with_the_nearest_and_the_suspects(plugins, name, near):
    with pytest.raises(ConfigError) as caught:
        select(plugins, name)
    problem, *suspicions = caught.value.problems
    assert (problem.given, problem.nearest) == (name, near)
    assert ("grpox plugins list" in problem.allowed) == (near == "")
    told = {word for each in suspicions for word in ("broken", "disabled") if word in each.what}
    assert told == {"broken", "disabled"}


def test_the_explanations_as_they_are_printed(plugins, golden, tmp_path):
    ordered = sorted(rows(plugins), key=lambda row: (row["kind"], row["name"], row["distribution"]))
    # Which of the two was found first is the file system's to say.
    either_way = {"grpox-other 1.0 and grpox-foo 1.0": "grpox-foo 1.0 and grpox-other 1.0"}
    failed = [row for row in ordered if row["status"] != "ok"]
    shown = printed(as_table(failed, why=True), Console(width=1000))
    text = re.sub("─+", "─", shown)  # as wide as the folder's path
    golden(text, replace={str(tmp_path): "FOLDER"} | either_way)


def test_the_remedy_of_a_conflict_resolves_it_and_none_disables_the_built_in_plugins(
    plugins, monkeypatch, make_distribution
):
    remedy = said(plugins)["loss same", "grpox-other"]["remedy"]
    assert "write grpox-other:same in the run file" in remedy
    assert [offer.qualified_name for offer in select(plugins, "grpox-other:same")] == ["grpox-other:same"]
    switch = re.search(r"GRPOX_DISABLE_PLUGINS=(\S+)", remedy)
    monkeypatch.setenv("GRPOX_DISABLE_PLUGINS", switch[1])
    (same,) = select(discover(), "loss/same")
    assert same.qualified_name == "grpox-other:same"
    make_distribution("grpox-third", OTHER.replace('"same"', '"dapo"'))
    remedies = [row["remedy"] for row in rows(discover(), "loss") if row["name"] == "dapo"]
    assert [remedy.endswith("=grpox") for remedy in remedies] == [False, False]


@pytest.mark.parametrize(
    ("extra", "remedy"),
    [
        ("requires=('a-b>=1 | c-d>=1', 'e-f', 'pluggy')", "pip install 'a-b>=1'\npip install 'e-f'"),
        ("requires=('a-b>=1', 'e-f'), install='make all'", "make all"),
        ("requires=('what is this',)", "its author has to correct that"),
        ("api=0", "pip install --upgrade grpox-lacking"),
    ],
)
def test_the_remedies_are_for_what_lacks(make_distribution, extra, remedy):
    make_distribution("grpox-lacking", OTHER.replace('Loss")', f'Loss", {extra})'))
    assert only("grpox-lacking")["remedy"] == remedy


def test_a_plugin_that_the_environment_disables_says_where_to_enable_it(plugins, monkeypatch):
    monkeypatch.setenv("GRPOX_DISABLE_PLUGINS", "zzz, Grpox_Off")
    row = only("grpox-off")
    assert (row["status"], row["why"]) == ("disabled", "by GRPOX_DISABLE_PLUGINS")
    assert row["remedy"] == "remove grpox-off from GRPOX_DISABLE_PLUGINS"


HOOK = "from grpox import ComponentSpec, hookimpl\n@hookimpl\ndef {}\n    return {}\n"


@pytest.mark.parametrize(
    ("source", "what", "place", "remedy"),
    [
        ("1\nraise ValueError('no')", "ValueError: no", ":2", 'python -c "import grpox_broken"'),
        (
            "def f():\n    import json\n    json.loads('[')\nf()",
            "JSONDecodeError",
            ":3 in f",
            "if the plugin is",
        ),
        ("x = (", "SyntaxError", ":1", "if the plugin is"),
        ("import absent_library", "ModuleNotFoundError", ":1", 'python -c "import grpox_broken"'),
        ("import grpox_broken.inner", "ModuleNotFoundError", ":1", "if the plugin is"),
        (HOOK.format("grpox_losses():", "1 / 0"), "ZeroDivision", ":4 in grpox_losses", "if the plugin is"),
        (HOOK.format("grpox_lossess():", "[]"), "mean grpox_losses?", ":2 in grpox_lossess", "plugin-api"),
        (HOOK.format("grpox_step_finished(stepp):", "1"), "stepp", ":2 in grpox_step_finished", "plugin-api"),
    ],
)
def test_a_broken_plugin_is_told_with_error_and_line(make_distribution, source, what, place, remedy):
    folder = make_distribution("grpox-broken", source)
    row = only("grpox-broken")
    assert (row["status"], what in row["why"]) == ("broken", True)
    assert row["why"].endswith(f"at {folder / 'grpox_broken.py'}{place}")
    assert remedy in row["remedy"]
    assert "GRPOX_DISABLE_PLUGINS=grpox-broken hides this message" in row["remedy"]


def printed_by(*arguments: str, columns: int = 80) -> str:
    done = CliRunner().invoke(app, list(arguments), env={"COLUMNS": str(columns)})
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_command_explains_in_80_columns_and_counts_the_rest_and_the_plain_list_points_to_it(
    plugins, make_distribution
):
    lines = [line.rstrip() for line in printed_by("list", "--why").splitlines()]
    assert max(map(len, lines)) <= 80
    assert " loss         same  grpox-other 1.0  conflict" in lines
    assert "              ValueError: [bold]no[/bold]" in lines
    assert not any(" dapo " in line for line in lines)
    assert re.fullmatch(r"rows that are ok: \d+", lines[-1])
    source = "open(__file__ + '.imports', 'a').write('x')\nraise ValueError"
    folder = make_distribution("grpox-worse", source)
    told = printed_by("list", "--kind", "plugin", columns=120)
    assert "grpox plugins list --why explains the 2 not ok" in told
    assert (folder / "grpox_worse.py.imports").read_text() == "x"  # a plugin is imported once


def test_json_has_exactly_these_keys_and_two_more_with_why(plugins):
    listed = json.loads(printed_by("list", "--json", "--kind", "loss"))
    keys = ["kind", "name", "distribution", "version", "status", "reason", "summary"]
    assert list(listed[0]) == keys
    explained = json.loads(printed_by("list", "--json", "--why", "--kind", "loss"))
    assert list(explained[0]) == [*keys, "why", "remedy"]
    told = {(row["name"], row["distribution"]): row for row in explained}
    assert "grpox-other:same" in told["same", "grpox-other"]["remedy"]
    assert (told["grpo", "grpox"]["status"], told["grpo", "grpox"]["why"]) == ("ok", "")
    assert "grpox_other:Loss" in printed_by("show", "grpox-other:same")


OWN = """
import os

from grpox.environments import Environment, tool


class Loss:
    def per_token(self, inputs): ...


class Unclear:
    def build(self, thing): ...


def score(completions, **columns):
    return [float(len(completion)) for completion in completions]


def neighbour(completions, **columns):
    return score([*completions[1:], completions[0]])


class World(Environment):
    example_rows = ({"prompt": "Go."},)

    def reply(self, text):
        return "go on"

    @tool
    def crash(self) -> None:
        "End the process."
        os._exit(1)
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "mine.py"
    path.write_text(OWN)
    return path


@pytest.mark.parametrize(
    ("members", "kind"),
    [
        ({"per_token": print}, "loss"),
        ({"scale": print}, "advantage"),
        ({"correct": print}, "correction"),
        ({"load": print}, "dataset"),
        ({"build": lambda self, parameters, learning_rate: None}, "optimizer"),
        ({"build": lambda self, optimizer, total_steps: None}, "scheduler"),
        ({"grpox_run_started": print}, "observer"),
        ({"__call__": print}, "reward"),
        ({}, ""),
    ],
)
def test_the_methods_tell_the_kind(members: dict[str, Any], kind: str) -> None:
    assert kind_of(type("Mine", (), members)) == kind


def test_functions_are_rewards_and_a_kind_that_is_not_clear_or_unknown_is_asked_for(mine: Path) -> None:
    kinds = [kind_of(each) for each in (load_object(f"{mine}:score"), load_object(f"{mine}:World"), 1)]
    assert kinds == ["reward", "environment", ""]
    for name, kind, given in (("Unclear", None, f"{mine}:Unclear"), ("Loss", "los", "los")):
        problem = problem_of(check_path, Console(quiet=True), f"{mine}:{name}", {}, kind)
        assert (problem.key, problem.given) == ("--kind", given)
    assert problem.nearest == "loss"


def test_one_passes_one_fails_and_a_tool_that_ends_its_process_is_told_by_name(mine: Path) -> None:
    assert check_path(Console(quiet=True), f"{mine}:score", {}, None)
    assert not check_path(Console(quiet=True), f"{mine}:neighbour", {}, "reward")
    console = Console(record=True, width=120, file=io.StringIO())
    assert not check_path(console, f"{mine}:World", {}, None)
    shown = console.export_text()
    for fact in ("World  environment", "tool 'crash': its process", "1 failed"):
        assert fact in shown
