"""The documentation as a site: it builds without a warning, and its generated pages hold what the code has."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from support.patience import patient

from grpox.cli.app import all_commands
from grpox.config import ComponentRef, RewardRef, RunConfig, Section
from grpox.config.run import SECTIONS
from grpox.plugins.discovery import Offer, discover
from grpox.plugins.hookspecs import KINDS
from grpox.plugins.loader import new_manager
from grpox.plugins.registry import Registry

pytest.importorskip("mkdocs", reason="mkdocs comes with `make docs`")

ROOT = Path(__file__).parents[2]
PLUGINS = discover()
BUILT_IN = [offer for offer in PLUGINS.offers if offer.distribution == "grpox"]


class Html:
    """Facts about a page that the tests need."""

    def __init__(self, text: str) -> None:
        self.ids = {unescape(each) for each in re.findall(r'\bid="([^"]*)"', text)}
        self.links = [unescape(each) for each in re.findall(r'<a\b[^>]*\bhref="([^"]*)"', text)]
        self.loads = re.findall(r'<(?:script|img|iframe)\b[^>]*\bsrc="([^"]*)"', text)
        sheets = re.findall(r"<link\b[^>]*>", text)
        named = [each for each in sheets if not re.search(r'rel="?(canonical|prev|next)\b', each)]
        self.loads += [each for sheet in named for each in re.findall(r'href="([^"]*)"', sheet)]
        rows = re.findall(r"<tr\b.*?</tr>", text, re.DOTALL)
        cells = [re.findall(r"<t[dh]\b[^>]*>(.*?)</t[dh]>", row, re.DOTALL) for row in rows]
        self.cells = [[unescape(re.sub(r"<[^>]+>", "", cell)) for cell in row] for row in cells]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    folder = tmp_path_factory.mktemp("docs") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(ROOT / "mkdocs.yml"), "-d"]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        [*command, folder], capture_output=True, text=True, env=environment, timeout=patient(120), check=False
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, Html]:
    """Address below the site's root -> page; the page of errors, whose links start elsewhere, left out."""
    return {
        path.relative_to(site).as_posix().removesuffix("index.html"): Html(path.read_text(encoding="utf-8"))
        for path in site.rglob("*.html")
        if path.name != "404.html"
    }


def text_between(page: str, start: str, end: str = r"<h[23]") -> str:
    found = re.search(rf'id="{re.escape(start)}"(.*?)(?:{end}|</article>)', page, re.DOTALL)
    assert found, start
    return re.sub(r"<[^>]+>", "", found[1])


def test_a_page_loads_nothing_from_elsewhere(site: Path, pages: dict[str, Html]) -> None:
    loads = {load for page in pages.values() for load in page.loads}
    assert any(load.endswith(".css") for load in loads)
    assert any(load.endswith(".js") for load in loads)
    foreign = {load for load in loads if urlsplit(load).netloc}
    sheets = "".join(path.read_text(encoding="utf-8") for path in site.rglob("*.css"))
    assert foreign == set()
    assert re.findall(r"url\(['\"]?(?:https?:)?//", sheets) == []
    for path in site.rglob("*.html"):
        assert not re.search('class="(mermaid|arithmatex)"', path.read_text(encoding="utf-8")), path


def test_every_page_of_the_docs_is_on_the_site_and_papers_are_links(pages: dict[str, Html]) -> None:
    names = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"index"}
    assert {f"{name}/" for name in names} <= pages.keys()
    assert {"", "repository/plugins/", "repository/benchmarks/"} <= pages.keys()
    sources = " ".join(offer.spec.source for offer in BUILT_IN)
    papers = {f"https://arxiv.org/abs/{number}" for number in re.findall(r"arXiv (\S+\d)", sources)}
    assert len(papers) > 8
    assert papers <= set(pages["built-ins/"].links)


@pytest.mark.parametrize("offer", BUILT_IN, ids=lambda offer: f"{offer.kind}-{offer.spec.name}")
def test_a_built_in_component_is_told_with_all_that_the_registry_knows(site: Path, offer: Offer) -> None:
    page = (site / "built-ins" / "index.html").read_text(encoding="utf-8")
    told = " ".join(unescape(text_between(page, f"{offer.kind}-{offer.spec.name}")).split())
    spec = offer.spec
    names = (*spec.needs, *spec.provides, *spec.requires)
    for fact in (spec.summary, spec.formula, spec.source, spec.target, *names):
        assert " ".join(fact.split()) in told
    model = Registry(PLUGINS).config_model(offer)
    for name, field in (model.model_fields if model else {}).items():
        assert name in told
        assert field.description, name


def test_every_hook_contract_and_suite_is_in_the_reference(pages: dict[str, Html]) -> None:
    hooks = [name for name in vars(new_manager().hook) if name.startswith("grpox_")]
    assert set(KINDS.values()) < set(hooks)
    assert [name for name in hooks if name not in pages["hooks/"].ids] == []
    source = (ROOT / "grpox" / "contracts.py").read_text(encoding="utf-8")
    classes = re.findall(r"^class (\w+)", source, re.MULTILINE)
    assert [name for name in classes if name.lower() not in pages["contracts/"].ids] == []
    # Read and not imported, because that takes torch.
    source = (ROOT / "grpox" / "testing" / "__init__.py").read_text(encoding="utf-8")
    names = re.findall(r'^    "(\w+)",$', source, re.MULTILINE)
    assert len(names) > 6
    anchors = pages["testing/"].ids
    assert [name for name in names if not any(each.endswith(f".{name}") for each in anchors)] == []


KEY_TABLE = ["key", "type", "default", "meaning"]
"""The heading of a section's table."""


@pytest.mark.parametrize(("anchor", "model"), [("sections-and-keys", RunConfig), *SECTIONS.items()], ids=str)
def test_every_key_of_the_run_file_is_told_with_its_meaning(
    site: Path, anchor: str, model: type[Section]
) -> None:
    page = (site / "run-file" / "index.html").read_text(encoding="utf-8")
    section = re.search(rf'id="{anchor}".*?(?=<h[234]|</article>)', page, re.DOTALL)
    assert section
    rows = {row[0]: row for row in Html(section[0]).cells if len(row) == len(KEY_TABLE)}
    assert rows.pop("key") == KEY_TABLE
    assert rows.keys() == model.model_fields.keys()
    for name, field in model.model_fields.items():
        _, kind, default, meaning = rows[name]
        assert kind
        assert default == "required" if field.is_required() else default
        assert meaning == " ".join(re.sub(r"`+", "", field.description or "-").split())


def test_a_rewards_own_keys_are_told_and_bars_in_tables_are_plain(site: Path, pages: dict[str, Html]) -> None:
    told = text_between((site / "run-file" / "index.html").read_text(encoding="utf-8"), "rewards")
    own = RewardRef.model_fields.keys() - ComponentRef.model_fields.keys()
    assert own
    assert [key for key in own if key not in told] == []
    cells = [cell for row in pages["run-file/"].cells for cell in row]
    assert any("grpox plan run.yaml | head -1" in cell for cell in cells)
    assert [cell for cell in cells if "\\|" in cell] == []


def commands(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    yield path, command
    for name, child in getattr(command, "commands", {}).items():
        yield from commands(child, f"{path} {name}")


def plain(told: str) -> str:
    """A help text without what marks it up."""
    return told.replace("\b", "").replace("`", "")


@pytest.mark.parametrize(("path", "command"), [*commands(all_commands(), "grpox")], ids=str)
def test_every_command_is_told_with_its_help_and_options(site: Path, path: str, command: Any) -> None:
    page = (site / "commands" / "index.html").read_text(encoding="utf-8")
    told = unescape(text_between(page, path.replace(" ", "-")))
    for line in plain(command.help).splitlines():
        assert line.strip() in told
    for parameter in command.params:
        if not getattr(parameter, "hidden", False):
            argument = parameter.param_type_name == "argument"
            assert (parameter.metavar if argument else parameter.opts[-1]) in told
            assert plain(parameter.help) in told


def test_the_tutorial_shows_the_files_of_the_example(site: Path) -> None:
    page = unescape(re.sub(r"<[^>]+>", "", (site / "writing-a-plugin" / "index.html").read_text()))
    example = ROOT / "plugins" / "examples" / "grpox-gmpo"
    assert (example / "src" / "grpox_gmpo" / "loss.py").read_text().rstrip() in page
    assert "--8<--" not in page


def test_every_formula_is_rendered(site: Path, pages: dict[str, Html]) -> None:
    pytest.importorskip("latex2mathml", reason="latex2mathml comes with `make docs`")
    html = (site / "algorithms" / "index.html").read_text(encoding="utf-8")
    formulas = re.findall(r"<math.*?</math>", html, re.DOTALL)
    assert len(formulas) > 50
    unread = [tex for tex in formulas if re.search(r"[\\&$]", unescape(re.sub(r"<[^>]+>", "", tex)))]
    assert unread == []
