"""Tables in terminals of every width: nothing is cut, and one is written in the singular."""

from __future__ import annotations

import re
from importlib import metadata

import pytest
from rich.console import Console, RenderableType
from support.golden import Golden

from grpox.cli.plan import plan_report
from grpox.cli.plugin_tables import as_table, details, rows, select
from grpox.cli.validate import validate_report
from grpox.errors.console import folding_table
from grpox.plugins.discovery import PluginSet, discover
from grpox.runfile.load import ResolvedRun, load_run

WIDTHS = [60, 80, 200]
LONG = "experiment-" + "x" * 150


@pytest.fixture(scope="module")
def run() -> ResolvedRun:
    return load_run(
        "quickstart", [f"tracking.mlflow.experiment={LONG}", "train.num_iterations=2"], world_size=8
    )


@pytest.fixture(scope="module")
def plugins() -> PluginSet:
    return discover()


def printed(renderable: RenderableType, console: Console) -> str:
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def joined(text: str) -> str:
    """The text as if it had never been folded."""
    return re.sub(r"\s+", "", text)


@pytest.mark.parametrize("width", WIDTHS)
def test_validate_shows_every_value_whole(run: ResolvedRun, width: int) -> None:
    shown = printed(validate_report(run), Console(width=width))
    assert f"experiment={LONG}" in joined(shown)
    for value in ("cache_implementation=dynamic", "aggregation=sum_then_normalize", "tracking_uri=null"):
        assert value in joined(shown)
    assert "…" not in shown


def test_values_are_written_as_in_a_run_file(run: ResolvedRun) -> None:
    shown = printed(validate_report(run), Console(width=400))
    assert "delta=null" in shown
    assert "strip=true" in shown
    assert "None" not in shown


@pytest.mark.parametrize("width", WIDTHS)
def test_cells_of_tables_are_folded_and_never_cut(width: int) -> None:
    table = folding_table("name", "cure")
    table.add_row("pip install " + "x" * 150, "y" * 150)
    shown = printed(table, Console(width=width))
    assert (shown.count("x"), shown.count("y"), "…" in shown) == (150, 150, False)


def test_what_is_known_of_a_component_as_it_is_printed(plugins: PluginSet, golden: Golden) -> None:
    [offer] = select(plugins, "dapo")
    shown = printed(details(plugins, offer), Console(width=80))
    golden(shown, replace={f"grpox {metadata.version('grpox')}": "grpox VERSION"})


def test_the_list_of_losses_as_it_is_printed(plugins: PluginSet, golden: Golden) -> None:
    losses = [row | {"version": "1.0"} for row in rows(plugins, "loss") if row["distribution"] == "grpox"]
    golden(printed(as_table(losses), Console(width=80)))


def test_the_plan_as_it_is_printed(golden: Golden) -> None:
    run = load_run("quickstart", ["train.num_iterations=2", "train.max_steps=2"], world_size=2)
    console = Console(width=80)
    golden(printed(plan_report(run.config.train, run.plan, run.num_prompts, 2, console), console))


@pytest.mark.parametrize("width", [60, 80, 100, 200])
@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_the_plan_fits_with_all_its_columns(width: int, world_size: int) -> None:
    run = load_run("quickstart", ["train.num_iterations=2", "train.max_steps=2"], world_size)
    console = Console(width=width)
    shown = printed(plan_report(run.config.train, run.plan, run.num_prompts, 2, console), console)
    table = [line for line in shown.splitlines() if line.startswith(tuple("┏┡│├└"))]
    assert {line[-1] for line in table} <= set("┓┩│┤┘")
    assert len({len(line) for line in table}) == 1
    assert f"GPU {world_size - 1}" in shown
    assert "…" not in shown


def test_the_plan_counts_one_in_the_singular() -> None:
    console = Console(width=200)
    # Of 9500 prompts, batches of 7 leave one over, batches of 3 two, and batches of 10 none.
    for per_device, told in ((14, "drops 1 prompt"), (6, "drops 2 prompts")):
        sizes = [f"train.per_device_train_batch_size={per_device}", "train.num_generations=2"]
        run = load_run("quickstart", sizes, world_size=1)
        assert told in printed(plan_report(run.config.train, run.plan, run.num_prompts, 1, console), console)
    sizes = ["train.per_device_train_batch_size=20", "train.num_generations=2"]
    run = load_run("quickstart", sizes, world_size=1)
    assert "drops" not in printed(plan_report(run.config.train, run.plan, run.num_prompts, 1, console), console)


def test_a_plan_of_a_million_passes_is_drawn_in_part() -> None:
    run = load_run("quickstart", ["train.num_iterations=1000000", "train.max_steps=2000"], world_size=1)
    console = Console(width=200)
    shown = printed(plan_report(run.config.train, run.plan, run.num_prompts, 1, console), console)
    assert re.search(r"│ +500 │$", shown, re.MULTILINE)
    assert not re.search(r"│ +501 │$", shown, re.MULTILINE)
    assert re.search(r"^│ +\.\.\. ", shown, re.MULTILINE)


def test_validate_counts_one_prompt_in_the_singular() -> None:
    run = load_run("quickstart", ["train.per_device_train_batch_size=16"], world_size=1)
    assert "generation batch: 1 prompt x 16 completions = 16" in printed(
        validate_report(run), Console(width=200)
    )
