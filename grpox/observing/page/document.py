"""Assembles the page of a run: one HTML document with its styles and scripts inline.

Texts of a run are untrusted. The page writes them as text alone, and its content security policy names its own
scripts and styles by hash, so that the browser refuses any other.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpox.errors import INVISIBLE

_UNSAFE = re.compile(f"[<>&]|{INVISIBLE.pattern}")
"""Characters that could end the element with the data, or that a reader of the file would not see."""
_HERE = Path(__file__).parent
_STYLES = ("vendor/uPlot.min.css", "page.css")
_SCRIPTS = ("dom.js", "ask.js", "charts.js", "time.js", "tokens.js", "completions.js", "about.js", "page.js")
"""Scripts in the order in which they run; they are one script, and see each other's names."""


def document(frozen: Mapping[str, Any] | None = None, title: str = "grpox") -> str:
    """Return the page as HTML.

    Args:
        frozen: runs and answers that the page shows; None: it asks the server that served it.
        title: of the browser's window.
    """
    styles = "\n".join(_read(name) for name in _STYLES)
    scripts = [_read("vendor/uPlot.iife.min.js"), '"use strict";\n' + "\n".join(map(_read, _SCRIPTS))]
    digests = [hashlib.sha256(text.encode()).digest() for text in (styles, *scripts)]
    style, *script = [f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests]
    connect = "'self'" if frozen is None else "'none'"
    parts = {
        "policy": f"default-src 'none'; style-src {style}; script-src {' '.join(script)}; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'",
        "title": html.escape(title.encode(errors="replace").decode()),
        "styles": f"<style>{styles}</style>",
        "frozen": ""
        if frozen is None
        else f'<script type="application/json" id="frozen">{embed(frozen)}</script>',
        "scripts": "\n".join(f"<script>{script}</script>" for script in scripts),
    }
    text = _read("page.html")
    before, *rest = text.split("{{ ")
    # Split once: nothing of a run that looks like a placeholder is replaced.
    return before + "".join(parts[name] + after for name, after in (part.split(" }}", 1) for part in rest))


def embed(value: Any) -> str:
    """Write a value as JSON in which no text can end the ``<script>`` around it or open a comment.

    Half a surrogate pair, which a text of a run may hold and UTF-8 cannot, is escaped too.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _read(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8").strip()
