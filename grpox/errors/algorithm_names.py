"""Names of algorithms, which are no misspellings of one another: gspo is not grpo."""

from __future__ import annotations

from collections.abc import Iterable

from grpox.errors import nearest

_ALGORITHMS = {
    *("ppo", "gspo", "gspo_token", "gmpo", "gpg", "dpo", "kto", "orpo", "rloo", "remax", "opo", "dppo", "topr"),
    *("luspo", "vespo", "cispo", "sapo", "grpo", "dr_grpo", "dapo", "bnpo", "reinforce", "reinforce_plus_plus"),
    *("gdpo", "gigpo", "maxrl"),
}
_OTHER_WORDS = {
    "loss": {"gspo": "{name: grpo, level: sequence}"},
    "advantage": {"grpo": "group", "dr_grpo": "none", "gdpo": "{name: group, aggregation: normalize_then_sum}"},
}
"""Kind of component -> name of an algorithm -> what grpox calls this part of it."""


def nearest_algorithm(name: str, candidates: Iterable[str], kind: str = "") -> str:
    """Return the candidate that `name` is another spelling of; empty if `name` is another algorithm.

    Args:
        name: the given name; capitals, dots, hyphens and ``++`` do not matter.
        kind: kind of the component, ``loss`` or ``advantage``, some algorithms of which have another name here.
    """
    known = {_plain_name(candidate): candidate for candidate in candidates}
    word = _plain_name(name)
    if word in known:
        return known[word]
    if word in _ALGORITHMS:
        return _OTHER_WORDS.get(kind, {}).get(word, "")
    return known.get(nearest(word, known), "")


def _plain_name(name: str) -> str:
    return name.lower().replace("+", "_plus").replace(".", "_").replace("-", "_")
