"""The page of built-in components, from what the registry knows of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from field_table import field_table
from prose import prose

from grpox.errors.validation import fields_by_key
from grpox.plugins.discovery import Offer, PluginSet, discover
from grpox.plugins.hookspecs import KINDS
from grpox.plugins.registry import Registry

PLURALS = {kind: hook.removeprefix("grpox_") for kind, hook in KINDS.items()}


def built_ins() -> str:
    """Markdown: a section for each kind, and in it one for each component that comes with grpox."""
    plugins = discover()
    return "\n\n".join(_blocks(plugins, [o for o in plugins.offers if o.distribution == "grpox"]))


def anchor(kind: str, name: str) -> str:
    """Return the anchor of a component on the page."""
    return f"{kind}-{name}"


def _blocks(plugins: PluginSet, offers: list[Offer]) -> Iterator[str]:
    for kind, plural in PLURALS.items():
        of_kind = [offer for offer in offers if offer.kind == kind]
        yield f"## {plural.capitalize()}"
        if not of_kind:
            hook = KINDS[kind]
            yield f"None is built in. The hook is [`{hook}`](hooks.md#{hook})."
        for offer in of_kind:
            yield f"### `{offer.spec.name}` {{ #{anchor(kind, offer.spec.name)} }}"
            yield f"{prose(offer.spec.summary)}."
            if offer.spec.formula:
                yield f"```text\n{offer.spec.formula}\n```"
            yield _facts(offer)
            yield _parameters(plugins, offer)


def _facts(offer: Offer) -> str:
    spec = offer.spec
    facts = {
        "source": linked(spec.source),
        "needs": _codes(spec.needs),
        "provides": _codes(spec.provides),
        "requires": _codes(spec.requires),
        "install": _codes([spec.install] if spec.install else []),
        "code": _codes([spec.target]),
    }
    return "\n".join(f"- {name}: {told}" for name, told in facts.items() if told)


def _parameters(plugins: PluginSet, offer: Offer) -> str:
    model = Registry(plugins).config_model(offer)
    return field_table(fields_by_key(model)) if model and model.model_fields else "No parameters."


def _codes(texts: Iterable[str]) -> str:
    return ", ".join(f"`{text}`" for text in texts)


def linked(source: str) -> str:
    """A source with its arXiv numbers and addresses as links."""
    source = re.sub(r"arXiv (\d{4}\.\d{4,5})", r"[arXiv \1](https://arxiv.org/abs/\1)", source)
    return re.sub(r"(?<!\()https://\S+", r"<\g<0>>", source)
