"""Under which names vLLM takes embeddings that are also the model's head."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from torch import nn

T = TypeVar("T")
HEAD = "lm_head.weight"
EMBEDDING = "embed_tokens.weight"


def head_is_embedding(model: nn.Module) -> bool | None:
    """Return True where vLLM's model keeps one parameter for both, None where it has no other head.

    Ask before a reload, which takes them apart.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    # Where vLLM has wrapped a layer to give it adapters, its weight is one level below.
    if not any(name.startswith(HEAD.removesuffix("weight")) for name in parameters):
        return None
    head = parameters.get(HEAD)
    return head is not None and any(
        name.endswith(EMBEDDING) and parameter is head for name, parameter in parameters.items()
    )


def as_loaded(
    weights: Iterable[tuple[str, T]], tied: bool, one_parameter: bool | None
) -> Iterator[tuple[str, T]]:
    """What to load for what the policy has: its tied embeddings are the head's weights too.

    The CPU build packs a head of its own out of what is loaded as the head, never of what is loaded as the
    embeddings. What is loaded as the head of one parameter is the embeddings' as well: under both names it
    would be copied and packed twice.

    Args:
        tied: as the model's config says.
        one_parameter: what `head_is_embedding` said.
    """
    for name, weight in weights:
        embedding = tied and one_parameter is not None and name.endswith(EMBEDDING)
        if not embedding or not one_parameter:
            yield name, weight
        if embedding:
            yield HEAD, weight
