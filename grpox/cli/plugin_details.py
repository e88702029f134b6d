"""`grpox plugins show NAME`: parameters, formula, source and capabilities of a component."""

from __future__ import annotations

from pydantic.fields import FieldInfo
from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from grpox.cli.plugin_list import labelled
from grpox.errors import ConfigError, Problem, nearest
from grpox.errors.validation import allowed_values, fields_by_key, written
from grpox.plugins.discovery import Offer, PluginSet
from grpox.plugins.registry import Registry


def select(plugins: PluginSet, name: str) -> list[Offer]:
    """Find all components that match ``NAME``, ``kind/NAME``, ``dist:NAME`` or ``kind/dist:NAME``.

    Raises:
        ConfigError: no component matches.
    """
    kind, _, rest = name.rpartition("/")
    distribution, _, bare = rest.rpartition(":")
    if offers := plugins.offers_called(bare, kind, distribution):
        return offers
    known = {
        f"{prefix}{spelling}"
        for offer in plugins.offers
        for prefix in ("", f"{offer.kind}/")
        for spelling in (offer.spec.name, offer.qualified_name)
    }
    low = name.lower()
    near = min((each for each in known if each.startswith(low)), key=len, default=nearest(low, sorted(known)))
    allowed = "" if near else "the names in: grpox plugins list"
    problem = Problem("no such component", given=name, allowed=allowed, nearest=near)
    raise ConfigError([problem, *map(Problem, plugins.suspicions())])


def details(plugins: PluginSet, offer: Offer, narrow: bool = False) -> Group:
    """Draw all details of one component for a terminal. Imports its config, but not its target.

    Args:
        narrow: stack the details of a parameter, for a terminal too narrow for columns.
    """
    heading = Text.assemble((offer.spec.name, "bold"), f"  {offer.kind}, {offer.origin}")
    return Group(heading, _facts(offer), Padding(_parameters(plugins, offer, narrow), (0, 0, 1, 2)))


def _facts(offer: Offer) -> RenderableType:
    spec = offer.spec
    facts = {
        "summary": spec.summary,
        "status": "" if offer.status == "ok" else f"{offer.status}: {offer.reason}",
        "formula": spec.formula or "none given",
        "source": spec.source or "none given",
        "needs": ", ".join(spec.needs) or "nothing",
        "provides": ", ".join(spec.provides) or "nothing",
        "requires": ", ".join(spec.requires),
        "target": spec.target,
        "config": spec.config,
        "plugin API": str(spec.api),
    }
    return labelled({label: text for label, text in facts.items() if text})


def _parameters(plugins: PluginSet, offer: Offer, narrow: bool) -> RenderableType:
    try:
        model = Registry(plugins).config_model(offer)
    except ConfigError as error:
        return Text(f"parameters unknown: {error}")
    if model is None or not model.model_fields:
        return Text("no parameters")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("parameter", "") if narrow else ("parameter", "type", "default", ""):
        table.add_column(heading, overflow="fold")
    for key, field in fields_by_key(model).items():
        description = " ".join((field.description or "").split())
        kind, default = allowed_values(field), _default(field)
        stacked = f"{kind}; {default if field.is_required() else f'default {default}'}\n{description}".strip()
        table.add_row(*map(Text, (key, stacked) if narrow else (key, kind, default, description)))
    return table


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if field.default_factory is not None and field.default_factory_takes_validated_data:
        return "from the others"
    return written(field.get_default(call_default_factory=True))
