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

from grpox.cli.plugin_details import details, select
from grpox.cli.plugin_list import Row, Why, as_json, as_paragraphs, as_table, explain, rows
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
    assert "write grpox-other:same" in said["loss", "same", "grpox-other"].reason
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


@pytest.mark.parametrize(
    ("name", "near"), [("smae", "same"), ("CAP", "capped"), ("loss/cappd", "loss/capped"), ("qqqq", "")]
)
def test_show_of_an_unknown_name_offers_the_nearest(plugins, name, near):
    with pytest.raises(ConfigError) as caught:
        select(plugins, name)
    problem = caught.value.problems[0]
    assert (problem.given, problem.nearest) == (name, near)
    assert ("grpox plugins list" in problem.allowed) == (near == "")


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
    facts = {line.split()[0]: " ".join(line.split()[1:]) for line in lines if line.split()}
    assert facts["formula"] == "-min(w, cap) A"
    assert facts["source"] == "A paper, eq. 8"
    assert facts["needs"] == "entropy"
    assert facts["provides"] == "nothing"
    assert facts["requires"] == "nothing-such>=1"
    assert (facts["target"], facts["config"]) == ("grpox_foo:Loss", "grpox_foo:Config")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (
            "loss/dapo",
            {
                "formula": "-min(w~ A, clip(w, 1-clip_low, 1+clip_high) A), w~ = min(w, delta)",
                "source": "DAPO, arXiv 2503.14476, eq. 8",
                "needs": "nothing",
                "provides": "nothing",
                "clip_low": "number > 0 and <= 1 0.2",
            },
        ),
        (
            "generator/vllm-server",
            {
                "formula": "none given",
                "source": "https://docs.vllm.ai",
                "provides": "logprobs, other-numerics, streaming",
                "retries": "integer >= 0 3",
            },
        ),
        (
            "reward/math",
            {
                "formula": "1[expression(text) = expression(answer)]",
                "source": "https://github.com/huggingface/Math-Verify",
                "config": "grpox_rewards.configs:MathConfig",
                "column": "text answer",
                "timeout_seconds": "number > 0 5.0",
            },
        ),
    ],
)
def test_show_prints_all_details_of_built_in_components(name, told):
    found = discover()
    (offer,) = select(found, name)
    lines = [" ".join(line.split()) for line in printed(details(found, offer)).splitlines()]
    missing = [f"{label} {text}" for label, text in told.items()]
    assert [start for start in missing if not any(line.startswith(start) for line in lines)] == []


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


# -- list --why --------------------------------------------------------------------------------------------


@pytest.fixture
def whys(plugins) -> dict[tuple[str, str, str], Why]:
    return all_whys(plugins)


def all_whys(plugins: PluginSet) -> dict[tuple[str, str, str], Why]:
    return {(row.kind, row.name, row.distribution): explain(plugins, row) for row in rows(plugins)}


def only(plugins: PluginSet, distribution: str) -> tuple[Row, Why]:
    """The one row of a distribution, explained."""
    (row,) = (row for row in rows(plugins) if row.distribution == distribution)
    return row, explain(plugins, row)


def test_exactly_the_rows_that_are_not_ok_have_reason_and_remedy(plugins, whys):
    for row in rows(plugins):
        why = whys[row.kind, row.name, row.distribution]
        assert bool(why.why) == bool(why.remedy) == (row.status != "ok"), row


def test_the_explanations_as_they_are_printed(plugins, whys, golden, tmp_path):
    ordered = sorted(rows(plugins), key=lambda row: (row.kind, row.name, row.distribution))
    explained = [whys[row.kind, row.name, row.distribution] for row in ordered]
    # Which of the two was found first is the file system's to say.
    either_way = {"grpox-other 1.0 and grpox-foo 1.0": "grpox-foo 1.0 and grpox-other 1.0"}
    golden(printed(as_paragraphs(ordered, explained), 1000), replace={str(tmp_path): "FOLDER"} | either_way)


def test_a_conflict_names_both_distributions_and_how_to_select_one(whys):
    why = whys["loss", "same", "grpox-other"]
    assert "loss 'same'" in why.why
    assert {"grpox-foo", "grpox-other"} <= set(why.why.split())
    use, switch_off = why.remedy.splitlines()
    assert use.endswith(" grpox-other:same")
    assert switch_off.endswith(" GRPOX_DISABLE_PLUGINS=grpox-foo")


def test_no_remedy_disables_the_built_in_plugins(make_distribution):
    make_distribution("grpox-other", OTHER.replace('"same"', '"dapo"'))
    remedies = [explain(discover(), row).remedy for row in rows(discover(), "loss") if row.name == "dapo"]
    assert len(remedies) == 2
    assert not any(remedy.endswith("=grpox") for remedy in remedies)


def test_the_remedy_of_a_conflict_resolves_it(plugins, monkeypatch):
    whole = re.search(r"run file: (\S+)", explain(plugins, rows(plugins, "loss")[1]).remedy)
    assert [offer.qualified_name for offer in select(plugins, whole[1])] == [whole[1]]
    switch = re.search(r"GRPOX_DISABLE_PLUGINS=(\S+)", explain(plugins, rows(plugins, "loss")[1]).remedy)
    monkeypatch.setenv("GRPOX_DISABLE_PLUGINS", switch[1])
    (same,) = select(discover(), "loss/same")
    assert same.qualified_name == whole[1]


def test_a_name_that_one_distribution_offers_twice_is_for_its_author_to_mend(make_distribution):
    folder = make_distribution("grpox-twice", OTHER, entry_points={"a": "grpox_twice", "b": "grpox_twice_b"})
    (folder / "grpox_twice_b.py").write_text(OTHER)
    plugins = discover()
    row = next(row for row in rows(plugins, "loss") if row.distribution == "grpox-twice")
    why = explain(plugins, row)
    for fact in ("loss 'same'", "grpox_twice and grpox_twice_b"):
        assert fact in why.why
    assert "author has to rename" in why.remedy
    assert "grpox-twice:same" not in row.reason + why.remedy


def test_what_a_component_requires_comes_with_the_command(whys):
    why = whys["loss", "capped", "grpox-foo"]
    assert "nothing-such>=1: not installed" in why.why
    assert why.remedy == "pip install 'nothing-such>=1'"


@pytest.mark.parametrize(
    ("extra", "remedy"),
    [
        ("requires=('a-b>=1 | c-d>=1', 'e-f', 'pluggy')", "pip install 'a-b>=1'\npip install 'e-f'"),
        ("requires=('a-b>=1', 'e-f'), install='make all'", "make all"),
    ],
)
def test_the_commands_are_those_for_what_lacks(make_distribution, extra, remedy):
    assert remedy_of(make_distribution, extra) == remedy


def test_a_requirement_that_is_none_is_its_authors_to_mend(make_distribution):
    remedy = remedy_of(make_distribution, "requires=('what is this',)")
    for fact in ("author has to correct", "requires=['what is this']"):
        assert fact in remedy
    assert "pip install" not in remedy


def remedy_of(make_distribution, extra: str) -> str:
    """The remedy for a component that is declared with more arguments."""
    spec = f"ComponentSpec('x', 'a:B', {extra})"
    source = f"from grpox import ComponentSpec, hookimpl\n@hookimpl\ndef grpox_losses():\n    return [{spec}]\n"
    make_distribution("grpox-lacking", source)
    return only(discover(), "grpox-lacking")[1].remedy


def test_another_api_version_says_which_way_to_move(whys):
    why = whys["correction", "capped", "grpox-foo"]
    for fact in ("API 99", "grpox has 1", "upgrade grpox"):
        assert fact in why.why
    newer_grpox, older_plugin = why.remedy.splitlines()
    assert newer_grpox == "pip install --upgrade grpox"
    assert older_plugin.endswith(" pip install 'grpox-foo<1.0'")


def test_a_plugin_of_an_older_api_is_to_be_upgraded(make_distribution):
    make_distribution("grpox-aged", OTHER.replace('grpox_other:Loss"', 'grpox_other:Loss", api=0'))
    row, why = only(discover(), "grpox-aged")
    assert row.status == "incompatible"
    assert why.remedy.startswith("pip install --upgrade grpox-aged\nIf the plugin is yours: ")


@pytest.mark.parametrize(
    ("value", "command"),
    [
        ("Grpox_Off", "unset GRPOX_DISABLE_PLUGINS"),
        ("zzz, grpox-off", "export GRPOX_DISABLE_PLUGINS=zzz"),
    ],
)
def test_a_plugin_that_the_environment_disables_says_how_to_undo_that(
    make_distribution, monkeypatch, value, command
):
    make_distribution("grpox-off", "")
    monkeypatch.setenv("GRPOX_DISABLE_PLUGINS", value)
    row, why = only(discover(), "grpox-off")
    assert row.status == "disabled"
    assert why == Why(f"It is switched off: GRPOX_DISABLE_PLUGINS is '{value}' in this environment.", command)


def test_a_plugin_that_a_run_file_disables_says_so(whys):
    why = whys["plugin", "plugin", "grpox-off"]
    assert "plugins.disable list" in why.why
    for fact in ("Remove grpox-off from", "plugins: {disable: [...]}", "run file"):
        assert fact in why.remedy


HOOK = "from grpox import ComponentSpec, hookimpl\n@hookimpl\ndef {}\n    return {}\n"


@pytest.mark.parametrize(
    ("source", "what", "place", "remedy"),
    [
        ("1\nraise ValueError('no')", "ValueError: no", ":2", 'python -c "import grpox_broken"'),
        ("def f():\n    import json\n    json.loads('[')\nf()", "JSONDecodeError", ":3 in f", "correct it"),
        ("x = (", "SyntaxError", ":1", "correct it"),
        (
            "import absent_library",
            "ModuleNotFoundError",
            ":1",
            "Install the package with the module 'absent_library'",
        ),
        ("import grpox_broken.inner", "ModuleNotFoundError", ":1", "correct it"),
        (HOOK.format("grpox_losses():", "1 / 0"), "ZeroDivisionError", ":4 in grpox_losses", "correct it"),
        (
            HOOK.format("grpox_lossess():", "[]"),
            "did you mean grpox_losses?",
            ":2 in grpox_lossess",
            "docs/plugin-api",
        ),
        (
            HOOK.format("grpox_step_finished(stepp):", "1"),
            "stepp",
            ":2 in grpox_step_finished",
            "docs/plugin-api",
        ),
    ],
)
def test_a_broken_plugin_is_told_with_error_and_line(make_distribution, source, what, place, remedy):
    folder = make_distribution("grpox-broken", source)
    row, why = only(discover(), "grpox-broken")
    assert row.status == "broken"
    assert what in why.why
    assert why.why.endswith(f"at {folder / 'grpox_broken.py'}{place}")
    assert remedy in why.remedy
    assert "GRPOX_DISABLE_PLUGINS=grpox-broken hides this message" in why.remedy


def why_command(*arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "grpox", "plugins", "list", "--why", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_the_command_explains_in_80_columns_and_counts_the_rest(make_distribution):
    make_distribution("grpox-other", OTHER)
    make_distribution("grpox-foo", SOURCE)
    make_distribution("grpox-bad", "raise ValueError('[bold]no[/bold]')")
    lines = [line.rstrip() for line in why_command(COLUMNS="80").splitlines()]
    assert max(map(len, lines)) <= 80
    assert "same  loss, grpox-other 1.0  conflict" in lines
    assert "  why  ValueError: [bold]no[/bold]" in lines
    assert not any(line.startswith("dapo  loss") for line in lines)
    assert re.fullmatch(r"\d+ other rows are ok", lines[-1])


def test_json_with_why_has_every_row_with_two_more_keys(make_distribution):
    make_distribution("grpox-other", OTHER)
    make_distribution("grpox-foo", SOURCE)
    listed = json.loads(why_command("--json", "--kind", "loss"))
    assert list(listed[0])[-2:] == ["why", "remedy"]
    said = {(row["name"], row["distribution"]): row for row in listed}
    assert "grpox-other:same" in said["same", "grpox-other"]["remedy"]
    assert (said["grpo", "grpox"]["status"], said["grpo", "grpox"]["why"]) == ("ok", "")


def test_the_plain_list_points_to_the_explanations_and_imports_a_plugin_once(make_distribution):
    folder = make_distribution("grpox-bad", "open(__file__ + '.imports', 'a').write('x')\nraise ValueError")
    listed = CliRunner().invoke(app, ["list", "--kind", "plugin"], env={"COLUMNS": "120"})
    assert "grpox plugins list --why explains the 1 not ok" in listed.stdout
    assert (folder / "grpox_bad.py.imports").read_text() == "x"


def test_a_list_imports_nothing_that_reads_run_files():
    """typer itself imports pydantic to read options; what of grpox does is not needed to list."""
    code = (
        "import sys; from grpox.cli.plugins import app\n"
        "app(['list'], standalone_mode=False)\n"
        "print({'torch', 'grpox.config'} & set(sys.modules), file=sys.stderr)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stderr == "set()\n"
