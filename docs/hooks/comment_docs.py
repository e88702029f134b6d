"""Shapes stand in comments behind fields, ``logprobs: Tensor  # f32[B, T]``: the reference shows them too."""

from __future__ import annotations

from typing import Any

from griffe import Attribute, Docstring, Extension


class CommentDocs(Extension):
    """Makes the comment behind an attribute its description, where it has no docstring."""

    def on_attribute(self, *, attr: Attribute, **_: Any) -> None:
        """Called for each attribute that is read from the sources."""
        if attr.docstring is None and attr.lineno is not None:
            line = attr.lines_collection[attr.filepath][attr.lineno - 1]  # type: ignore[index]
            comment = line.partition("  # ")[2]
            if comment:
                attr.docstring = Docstring(comment, lineno=attr.lineno, parent=attr)
