"""`grpox plugins list` and `show`: nothing that is installed is left unsaid."""

from __future__ import annotations

import json

import pytest
from rich.console import Console
from typer.testing import CliRunner

from grpox.cli.plugin_details import details, select
from grpox.cli.plugin_report import as_json, as_table, rows
from grpox.cli.plugins import app
from grpox.errors import ConfigError
from grpox.plugins import PluginSet, discover

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


def printed(renderable: object) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def test_every_component_and_every_plugin_that_failed_or_acts_unasked_has_a_row(plugins):
    listed = [(row.kind, row.name, row.distribution, row.status) for row in rows(plugins)]
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


def test_rows_say_why_and_what_to_do(plugins):
    said = {(row.kind, row.name, row.distribution): row for row in rows(plugins)}
    assert "say grpox-other:same" in said["loss", "same", "grpox-other"].reason
    assert said["plugin", "plugin", "grpox-bad"].reason == "ValueError: [bold]no[/bold]"
    assert "pip install 'nothing-such>=1'" in said["loss", "capped", "grpox-foo"].reason
    assert said["plugin", "plugin", "grpox-foo"].summary == "observes every run: grpox_run_finished"


def test_json_holds_the_same_rows_with_exactly_these_keys(plugins):
    listed = json.loads(as_json(rows(plugins)))
    assert len(listed) == 7
    assert list(listed[0]) == ["kind", "name", "distribution", "version", "status", "reason", "summary"]


def test_one_kind_only(plugins):
    assert {row.kind for row in rows(plugins, "loss")} == {"loss"}
    assert len(rows(plugins, "plugin")) == 3
    with pytest.raises(ConfigError) as caught:
        rows(plugins, "los")
    assert caught.value.problems[0].nearest == "loss"


def test_what_plugins_say_is_not_taken_for_markup(plugins):
    assert "ValueError: [bold]no[/bold]" in printed(as_table(rows(plugins, "plugin")))
    (same,) = select(plugins, "grpox-foo:same")
    assert "[red]Offered[/red] here" in printed(details(plugins, same))


def test_show_says_that_there_are_no_parameters(plugins):
    (same,) = select(plugins, "grpox-foo:same")
    assert "no parameters" in printed(details(plugins, same))


def test_show_gives_parameters_with_type_default_and_doc(plugins):
    (loss, _) = select(plugins, "capped")
    lines = printed(details(plugins, loss)).splitlines()
    cap = next(line for line in lines if line.split()[:1] == ["cap"])
    assert "number > 0" in cap
    assert "2.0" in cap
    assert "Largest weight, [bold]whatever[/bold] the ratio." in cap
    assert "required" in next(line for line in lines if line.split()[:1] == ["level"])
    assert "[]" in next(line for line in lines if line.split()[:1] == ["seeds"])
    for fact in ("-min(w, cap) A", "A paper, eq. 8", "entropy", "nothing-such>=1", "grpox_foo:Loss"):
        assert any(fact in line for line in lines)


def test_show_survives_a_config_that_cannot_be_imported(plugins):
    (correction,) = select(plugins, "correction/capped")
    assert "parameters unknown" in printed(details(plugins, correction))


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("capped", {("loss", "grpox-foo"), ("correction", "grpox-foo")}),
        ("loss/capped", {("loss", "grpox-foo")}),
        ("same", {("loss", "grpox-foo"), ("loss", "grpox-other")}),
        ("Grpox_Other:same", {("loss", "grpox-other")}),
        ("loss/grpox-foo:same", {("loss", "grpox-foo")}),
    ],
)
def test_the_spellings_that_show_accepts(plugins, name, found):
    assert {(offer.kind, offer.distribution) for offer in select(plugins, name)} == found


@pytest.mark.parametrize(("name", "near"), [("caped", "capped"), ("loss/sam", "loss/same"), ("zzz", "")])
def test_an_unknown_name_is_refused_with_the_nearest_and_the_suspects(plugins, name, near):
    with pytest.raises(ConfigError) as caught:
        select(plugins, name)
    problem, *suspicions = caught.value.problems
    assert problem.nearest == near
    assert {word for each in suspicions for word in ("broken", "disabled") if word in each.what} == {
        "broken",
        "disabled",
    }


def test_the_commands_print_what_is_installed(make_distribution):
    make_distribution("grpox-other", OTHER)
    listed = CliRunner().invoke(app, ["list", "--json", "--kind", "loss"])
    assert "grpox-other" in {row["distribution"] for row in json.loads(listed.stdout)}
    shown = CliRunner().invoke(app, ["show", "grpox-other:same"])
    assert shown.exit_code == 0
    assert "grpox_other:Loss" in shown.stdout
