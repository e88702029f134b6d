"""Makes links that leave docs/ work on the site: the files of the repository they lead to become pages of it.

``../plugins/README.md`` is right where the repository is read. On the site the same file is the page
``repository/plugins/README.md``; of a file that is not Markdown the page shows the text, of a folder its files.
What such pages link to follows them. So do those that the navigation names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

FENCE = re.compile(r"^( *)(```|~~~~~~).*?^\1\2", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(?=[#)])")
FOLDER = "repository"
FRONT_PAGE = {"README.md": "index.md"}
"""Files of the repository that a page of docs/ stands for."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for every file of the repository that a page links to."""
    root = Path(config.config_file_path).parent
    docs = Path(config.docs_dir).name
    waiting = {
        target
        for page in files.documentation_pages()
        for target in _targets(page.content_string, f"{docs}/{page.src_uri}")
    }
    in_nav = {uri.removeprefix(f"{FOLDER}/") for uri in _strings(config.nav) if uri.startswith(f"{FOLDER}/")}
    waiting |= in_nav
    done: set[str] = set()
    while waiting:
        path = waiting.pop()
        done.add(path)
        if _leaves(path, docs) and (root / path).exists():
            text = _markdown(root, path)
            inclusion = InclusionLevel.UNDEFINED if path in in_nav else InclusionLevel.NOT_IN_NAV
            files.append(File.generated(config, _uri(path, docs), content=text, inclusion=inclusion))
            waiting |= _targets(text, path) - done
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """Point the links that leave docs/, and all those of a page from outside, at the pages of the site."""
    docs = Path(config.docs_dir).name
    here = page.file.src_uri
    outside = here.startswith(f"{FOLDER}/")
    source = here.removeprefix(f"{FOLDER}/") if outside else f"{docs}/{here}"

    def on_site(match: re.Match[str]) -> str:
        target = _resolved(match[1], source)
        if not outside and not _leaves(target, docs):
            return match[1]
        return relpath(_uri(target, docs), PurePosixPath(here).parent.as_posix())

    text = _outside_fences(markdown, lambda part: LINK.sub(on_site, part))
    return _four_spaces(text) if outside else text


def _targets(markdown: str, source: str) -> set[str]:
    """The files that a file of the repository links to, as paths from the root."""
    return {_resolved(link, source) for link in LINK.findall(FENCE.sub("", markdown))}


def _resolved(link: str, source: str) -> str:
    return normpath(f"{PurePosixPath(source).parent}/{link}")


def _leaves(path: str, docs: str) -> bool:
    return not path.startswith(f"{docs}/") and path not in FRONT_PAGE


def _uri(path: str, docs: str) -> str:
    """The page of the site that shows a file of the repository."""
    if not _leaves(path, docs):
        return FRONT_PAGE.get(path) or path.removeprefix(f"{docs}/")
    return f"{FOLDER}/{path}" if path.endswith(".md") else f"{FOLDER}/{path}.md"


def _markdown(root: Path, path: str) -> str:
    """The page that shows a file of the repository, or a folder."""
    if (root / path).is_dir():
        names = sorted(file.name for file in (root / path).iterdir() if file.is_file())
        lines = [f"- [{name}]({PurePosixPath(path).name}/{name})" for name in names]
        return "\n".join([f"# {path}", "", *lines])
    text = (root / path).read_text(encoding="utf-8")
    if path.endswith(".md"):
        return text
    fence = "~~~~~~"
    return f"# {path}\n\n{fence}{PurePosixPath(path).suffix.removeprefix('.')}\n{text.rstrip()}\n{fence}\n"


def _strings(nav: Any) -> Iterator[str]:
    """The pages of a navigation, whatever their depth."""
    if isinstance(nav, str):
        yield nav
    for part in nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ():
        yield from _strings(part)


def _outside_fences(markdown: str, change: Callable[[str], str]) -> str:
    """`change` applied to all of a page but its fenced code."""
    parts, end = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [change(markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, change(markdown[end:])])


def _four_spaces(markdown: str) -> str:
    """Python-Markdown takes what belongs to an item of a list when it is indented by four; GitHub by three."""
    inside, lines = False, []
    for line in markdown.splitlines():
        inside = bool(re.match(r"\d+\. ", line)) or (inside and (not line or line.startswith("   ")))
        lines.append(f" {line}" if inside and line.startswith("   ") else line)
    return "\n".join(lines)
