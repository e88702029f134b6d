"""Fields of pydantic models as a Markdown table: key, what it accepts, default, description."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prose import prose
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from grpox.config import ComponentRef
from grpox.errors.validation import allowed_values, written


def field_table(fields: Mapping[str, FieldInfo], types: Mapping[str, str] | None = None) -> str:
    """The table of fields by their keys.

    Args:
        types: Markdown of the type column for some of the keys, where words of pydantic's type say too little.
    """
    told = {key: allowed_values(field) for key, field in fields.items()} | dict(types or {})
    rows = [
        (f"`{key}`", told[key], default_of(field), prose(field.description or ""))
        for key, field in fields.items()
    ]
    return table(("key", "type", "default", "meaning"), rows)


def default_of(field: FieldInfo) -> str:
    """A field's default as a run file would write it."""
    if field.is_required():
        return "required"
    if field.default_factory is not None and field.default_factory_takes_validated_data:
        return "from the others"
    default = field.get_default(call_default_factory=True)
    if isinstance(default, ComponentRef):
        return f"`{default.name}`"
    return "`{}`" if isinstance(default, BaseModel) else f"`{written(default)}`"


def table(heading: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table; line breaks and bars in its cells are taken care of."""
    names = [*heading]
    lines = [names, ["---"] * len(names), *([cell(text) for text in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(text: str) -> str:
    """Text that stays in its cell."""
    return " ".join(text.split()).replace("|", "\\|")
