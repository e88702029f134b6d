"""Data that a frozen page holds, read from its HTML."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from grpox.observing.page.report import render


def frozen_in(html: str) -> dict[str, Any]:
    """Return what stands in the page's one element of JSON."""
    (text,) = re.findall(r'<script type="application/json" id="frozen">(.*?)</script>', html, re.DOTALL)
    content: dict[str, Any] = json.loads(text)
    return content


def answers_of(folder: Path) -> dict[str, Any]:
    """Return the answers of the page that is rendered of a run: name -> answer."""
    answers = frozen_in(render([folder]))["answers"]
    return {name: answer for name, of_runs in answers.items() for answer in of_runs.values()}
