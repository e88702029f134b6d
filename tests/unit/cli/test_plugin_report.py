"""`grpox plugins list` and `show`: nothing that is installed is left unsaid."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
from rich.console import Console
from typer.testing import CliRunner

from grpox.cli.plugin_tables import Columns, as_table, details, rows, select
from grpox.cli.plugins import app
from grpox.errors import ConfigError
from grpox.plugins.discovery import PluginSet, discover

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


def printed(renderable: object, width: int = 200) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


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


def test_one_kind_only(plugins):
    assert {row["kind"] for row in rows(plugins, "loss")} == {"loss"}
    assert len(rows(plugins, "plugin")) == 3
    with pytest.raises(ConfigError) as caught:
        rows(plugins, "los")
    assert caught.value.problems[0].nearest == "loss"


def test_what_plugins_say_is_not_taken_for_markup(plugins):
    (same,) = select(plugins, "grpox-foo:same")
    shown = printed(details(plugins, same))
    assert "[red]Offered[/red] here" in shown
    assert "no parameters" in shown


def test_show_gives_parameters_with_type_default_and_doc(plugins):
    (loss, _) = select(plugins, "capped")
    lines = printed(details(plugins, loss)).splitlines()
    cap = next(place for place, line in enumerate(lines) if line.split()[:1] == ["cap"])
    assert "number > 0; default 2.0" in lines[cap]
    assert "Largest weight, [bold]whatever[/bold] the ratio." in lines[cap + 1]
    assert "required" in next(line for line in lines if line.split()[:1] == ["level"])
    assert "[]" in next(line for line in lines if line.split()[:1] == ["seeds"])
    facts = {line.split()[0]: " ".join(line.split()[1:]) for line in lines if line.split()}
    assert (facts["formula"], facts["source"]) == ("-min(w, cap) A", "A paper, eq. 8")
    assert (facts["needs"], facts["provides"]) == ("entropy", "nothing")
    assert (facts["requires"], facts["config"]) == ("nothing-such>=1", "grpox_foo:Config")


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


@pytest.mark.parametrize(("name", "near"), [("CAP", "capped"), ("loss/sam", "loss/same"), ("zzz", "")])
def test_an_unknown_name_is_refused_with_the_nearest_and_the_suspects(plugins, name, near):
    with pytest.raises(ConfigError) as caught:
        select(plugins, name)
    problem, *suspicions = caught.value.problems
    assert (problem.given, problem.nearest) == (name, near)
    assert ("grpox plugins list" in problem.allowed) == (near == "")
    told = {word for each in suspicions for word in ("broken", "disabled") if word in each.what}
    assert told == {"broken", "disabled"}


# -- list --why ------------------------------------------------------------------------------------------


def test_the_explanations_as_they_are_printed(plugins, golden, tmp_path):
    ordered = sorted(rows(plugins), key=lambda row: (row["kind"], row["name"], row["distribution"]))
    # Which of the two was found first is the file system's to say.
    either_way = {"grpox-other 1.0 and grpox-foo 1.0": "grpox-foo 1.0 and grpox-other 1.0"}
    failed = [row for row in ordered if row["status"] != "ok"]
    text = re.sub("─+", "─", printed(as_table(failed, why=True), 1000))  # as wide as the folder's path
    golden(text, replace={str(tmp_path): "FOLDER"} | either_way)


def test_no_remedy_disables_the_built_in_plugins(make_distribution):
    make_distribution("grpox-other", OTHER.replace('"same"', '"dapo"'))
    remedies = [row["remedy"] for row in rows(discover(), "loss") if row["name"] == "dapo"]
    assert len(remedies) == 2
    assert not any(remedy.endswith("=grpox") for remedy in remedies)


def test_the_remedy_of_a_conflict_resolves_it(plugins, monkeypatch):
    remedy = said(plugins)["loss same", "grpox-other"]["remedy"]
    assert "write grpox-other:same in the run file" in remedy
    assert [offer.qualified_name for offer in select(plugins, "grpox-other:same")] == ["grpox-other:same"]
    switch = re.search(r"GRPOX_DISABLE_PLUGINS=(\S+)", remedy)
    monkeypatch.setenv("GRPOX_DISABLE_PLUGINS", switch[1])
    (same,) = select(discover(), "loss/same")
    assert same.qualified_name == "grpox-other:same"


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
        (
            HOOK.format("grpox_lossess():", "[]"),
            "did you mean grpox_losses?",
            ":2 in grpox_lossess",
            "plugin-api",
        ),
        (HOOK.format("grpox_step_finished(stepp):", "1"), "stepp", ":2 in grpox_step_finished", "plugin-api"),
    ],
)
def test_a_broken_plugin_is_told_with_error_and_line(make_distribution, source, what, place, remedy):
    folder = make_distribution("grpox-broken", source)
    row = only("grpox-broken")
    assert row["status"] == "broken"
    assert what in row["why"]
    assert row["why"].endswith(f"at {folder / 'grpox_broken.py'}{place}")
    assert remedy in row["remedy"]
    assert "GRPOX_DISABLE_PLUGINS=grpox-broken hides this message" in row["remedy"]


# -- The commands ----------------------------------------------------------------------------------------


def printed_by(*arguments: str, columns: int = 80) -> str:
    done = CliRunner().invoke(app, list(arguments), env={"COLUMNS": str(columns)})
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_command_explains_in_80_columns_and_counts_the_rest(plugins):
    lines = [line.rstrip() for line in printed_by("list", "--why").splitlines()]
    assert max(map(len, lines)) <= 80
    assert " loss         same  grpox-other 1.0  conflict" in lines
    assert "              ValueError: [bold]no[/bold]" in lines
    assert not any(" dapo " in line for line in lines)
    assert re.fullmatch(r"rows that are ok: \d+", lines[-1])


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


def test_the_plain_list_points_to_the_explanations_and_imports_a_plugin_once(make_distribution):
    folder = make_distribution("grpox-bad", "open(__file__ + '.imports', 'a').write('x')\nraise ValueError")
    told = printed_by("list", "--kind", "plugin", columns=120)
    assert "grpox plugins list --why explains the 1 not ok" in told
    assert (folder / "grpox_bad.py.imports").read_text() == "x"


def test_a_list_imports_nothing_heavy_and_nothing_that_reads_run_files():
    """typer itself imports pydantic to read options; what of grpox does is not needed to list."""
    heavy = {"torch", "transformers", "deepspeed", "vllm", "datasets", "mlflow", "grpox.config"}
    code = (
        "import sys; from grpox.cli.plugins import app\n"
        "app(['list'], standalone_mode=False)\n"
        f"print({heavy} & set(sys.modules), file=sys.stderr)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stderr == "set()\n"
