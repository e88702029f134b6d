"""The docs against the code: keys, defaults, component names, modules, links and computed numbers."""

from __future__ import annotations

import doctest
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from support.docs_blocks import PAGES, ROOT, prose

from grpox.config import ComponentRef, Section
from grpox.config.run import SECTIONS
from grpox.contracts import LossInputs, PolicyLoss
from grpox.plugins.discovery import discover
from grpox.plugins.registry import Registry
from grpox.runfile.lr_schedules import SCHEDULES
from grpox.runfile.yaml_lines import read_yaml
from grpox_losses.configs import CispoConfig, ClippedConfig, SapoConfig
from grpox_losses.losses import Cispo, Dapo, Sapo

sys.path.insert(0, str(ROOT / "docs" / "hooks"))
import listings

RUN_FILE = (ROOT / "docs" / "run-file.md").read_text(encoding="utf-8")
ALGORITHMS = "\n".join(
    (ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("algorithms.md", "corrections.md")
)
REQUIRED = object()

PLUGINS = discover()
BUILT_IN = [offer for offer in PLUGINS.offers if offer.distribution == "grpox"]


def tables(text: str) -> Iterator[tuple[list[str], list[list[str]]]]:
    """(cells of the heading, rows of cells) of each table of a page."""
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        lines = [line.strip(" |").split(" |") for line in block.splitlines()]
        heading, _, *rows = ([cell.strip() for cell in line] for line in lines)
        yield heading, rows


def documented_parameters() -> dict[str, dict[str, Any]]:
    """Heading -> key -> default, of each table ``| `name` | default | meaning |``; names may share a table."""
    found: dict[str, dict[str, Any]] = {}
    for heading, rows in tables(ALGORITHMS):
        if heading[1:] == ["default", "meaning"]:
            defaults = {key.strip("`"): default_in(cell) for key, cell, *_ in rows}
            found |= dict.fromkeys(re.findall(r"`([^`]+)`", heading[0]), defaults)
    return found


def default_in(cell: str) -> Any:
    return REQUIRED if cell == "required" else read_yaml(cell.strip("`"), "docs").data


def default_of(field: FieldInfo) -> Any:
    """As a run file would write it."""
    default = field.get_default(call_default_factory=True, validated_data={})
    if field.is_required():
        return REQUIRED
    if isinstance(default, Section):
        return {}
    return default.name if isinstance(default, ComponentRef) else default


def defaults_of(model: type[BaseModel]) -> dict[str, Any]:
    return {name: default_of(field) for name, field in model.model_fields.items()}


DOCUMENTED = documented_parameters()


def test_every_section_of_the_run_file_has_its_generated_table() -> None:
    nested = {"rewards", "environment", "environment.when", "model.lora", "evaluation.early_stop"}
    nested |= {"alarms.dead_reward", "evaluation.sampling", "evaluation.sets", "train.adaptive_entropy"}
    markers = re.findall(r"^<!-- generated: keys:(\S+) -->$", RUN_FILE, re.MULTILINE)
    assert sorted(markers) == sorted({"run", *SECTIONS, *nested})


@pytest.mark.parametrize("name", DOCUMENTED)
def test_a_table_of_parameters_has_a_components_keys_and_defaults(name: str) -> None:
    [offer] = [offer for offer in BUILT_IN if offer.spec.name == name]
    model = Registry(PLUGINS).config_model(offer)
    assert model is not None
    assert DOCUMENTED[name] == defaults_of(model)


def test_every_built_in_component_and_schedule_is_named() -> None:
    names = [*SCHEDULES, *(offer.spec.name for offer in BUILT_IN)]
    assert [name for name in names if f"`{name}`" not in RUN_FILE] == []
    explained = [o.spec.name for o in BUILT_IN if o.kind in ("loss", "advantage", "correction")]
    assert [name for name in explained if f"`{name}`" not in ALGORITHMS] == []


def test_every_package_is_on_the_map_in_the_order_of_imports() -> None:
    design = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    (rows,) = (rows for heading, rows in tables(design) if heading[0] == "package")
    listed = [row[0].strip("`").removesuffix(".py") for row in rows]
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    order = next(contract["layers"] for contract in settings["contracts"] if contract["type"] == "layers")
    assert listed == order[::-1]
    drawn = design.partition("```\n")[2].partition("```")[0].splitlines()[1:]
    assert [line.split()[0] for line in drawn] == order
    there = {path.parent.name for path in (ROOT / "grpox").glob("*/__init__.py")} | {"contracts", "toolkit"}
    assert there == set(order)


def is_generated(page: Path) -> bool:
    """Tell whether a page gets headings when the site is built; `test_docs_site.py` then knows its anchors."""
    return re.search(r"^(<!-- generated: |::: )", page.read_text(encoding="utf-8"), re.MULTILINE) is not None


def headings(page: Path) -> set[str]:
    """The anchors of a page, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_link_leads_somewhere() -> None:
    dead = []
    links = [(page, target) for page in PAGES for target in re.findall(r"\]\(([^)\s]+)\)", prose(page))]
    for page, target in links:
        file, _, anchor = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        if "://" in target or (path.exists() and not anchor):
            continue
        if not path.exists() or not (is_generated(path) or anchor in headings(path)):
            dead.append(f"{page.name}: {target}")
    assert len(links) > 500
    assert dead == []


def test_a_formula_within_a_line_has_nothing_that_github_reads_as_markdown() -> None:
    """Refuse escapes, such as a backslash before a comma, and underscores that could begin emphasis."""
    for page in PAGES:
        text = re.sub(r"`[^`]+`", "", prose(page))
        formulas = re.findall(r"(?<![\\\w])\$(\S(?:[^$\n]*\S)?)\$(?!\w)", text)
        assert [tex for tex in formulas if re.search(r"\\[^A-Za-z ]|[^A-Za-z0-9]_", tex)] == [], page


def slope(loss: PolicyLoss, ratio: float, advantage: float) -> float:
    """The factor by which a token pushes its log-probability, in units of its advantage."""
    logprobs = torch.tensor([[ratio]]).log().requires_grad_()
    whole, mask = torch.full((1, 1), advantage), torch.ones(1, 1, dtype=torch.bool)
    output = loss.per_token(LossInputs(logprobs, torch.zeros(1, 1), whole, mask))
    (gradient,) = torch.autograd.grad(output.loss.sum(), logprobs)
    return -gradient.item() / advantage


def test_the_table_of_gradients_is_what_the_losses_give() -> None:
    clipped, cispo, sapo = Dapo(ClippedConfig(clip_high=0.28)), Cispo(CispoConfig()), Sapo(SapoConfig())
    columns: list[tuple[PolicyLoss, float]] = [
        *((clipped, 1.0), (clipped, -1.0), (cispo, 1.0)),
        *((sapo, 1.0), (sapo, -1.0)),
    ]
    (rows,) = [rows for heading, rows in tables(ALGORITHMS) if heading[0] == "w"]
    assert len(rows) == 6
    for ratio, *told in rows:
        given = [slope(loss, float(ratio), advantage) for loss, advantage in columns]
        assert [float(cell) for cell in told] == pytest.approx(given, abs=5e-4)


def test_the_example_of_a_step_gives_what_the_formulas_say() -> None:
    (code,) = re.findall(r"```python\n(.*?step_gradient\(.*?)```", ALGORITHMS, re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    # Three tokens. Ratios e^0.1 and 1 with A = 1, e^0.5 with A = -1: none is clipped.
    ratios = torch.tensor([[0.1, 0.0], [0.5, 0.0]], dtype=torch.float64).exp()
    assert names["loss"].item() == pytest.approx((-ratios[0, 0] - 1 + ratios[1, 0]).item() / 3)
    expected = ratios * torch.tensor([[-1.0, -1.0], [1.0, 0.0]]) / 3
    torch.testing.assert_close(names["gradients"][0], expected.double())


def test_every_number_of_the_page_that_works_by_hand_is_what_its_code_gives() -> None:
    failed, tried = doctest.testfile(str(ROOT / "docs" / "by-hand.md"), module_relative=False)
    assert (failed, tried > 10) == (0, True)


@pytest.mark.parametrize("page", listings.PAGES)
def test_a_page_lists_the_source_of_today(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert text == listings.page_of(page), "write the pages anew: python docs/hooks/listings.py"
