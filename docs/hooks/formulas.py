r"""Renders formulas as MathML when the site is built, so that a page needs neither scripts nor a network.

Pages write TeX as GitHub reads it: ``$r_i$`` within a line, a fenced block ``math`` for a formula of its own.
Arithmatex, an extension of Python-Markdown, marks both; this hook converts them with latex2mathml.
"""

from __future__ import annotations

import logging
import re
from html import escape, unescape
from typing import Any

try:
    from latex2mathml.converter import convert
except ImportError:  # it comes with the extra `docs`
    convert = None

FORMULA = re.compile(r'<(?P<tag>span|div) class="arithmatex">\\[(\[](?P<tex>.*?)\\[)\]]</(?P=tag)>', re.DOTALL)
log = logging.getLogger("mkdocs.hooks.formulas")


def on_startup(**_: Any) -> None:
    """Say once when formulas stay TeX."""
    if convert is None:
        log.info("Formulas stay TeX: latex2mathml is not installed.")


def on_page_content(html: str, **_: Any) -> str:
    """Replace the formulas of a page by MathML, or by their TeX where latex2mathml is not installed."""
    return FORMULA.sub(_rendered, html)


def _rendered(match: re.Match[str]) -> str:
    tex, is_block = unescape(match["tex"]).strip(), match["tag"] == "div"
    if convert is None:
        code = f"<code>{escape(tex)}</code>"
        return f"<pre>{code}</pre>" if is_block else code
    mathml = convert(tex, display="block" if is_block else "inline")
    return f'<div class="formula" style="overflow-x: auto">{mathml}</div>' if is_block else mathml
