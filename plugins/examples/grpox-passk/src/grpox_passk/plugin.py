"""Describe this plugin to grpox in strings, so that listing it imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterable

from grpox import ComponentSpec, hookimpl


@hookimpl
def grpox_advantages() -> Iterable[ComponentSpec]:
    """The one advantage of this plugin."""
    yield ComponentSpec(
        name="passk",
        target="grpox_passk.advantage:PasskAdvantage",
        config="grpox_passk.config:PasskAdvantageConfig",
        summary="Pass@k training: sets of k are rewarded if one is right, and not each completion",
        formula="right: fail/std, wrong: (fail - C(n_wrong-1, k-1)/C(n-1, k-1))/std, "
        "fail = C(n_wrong, k)/C(n, k), std = sqrt(fail (1 - fail))",
        source="Pass@k Training for Adaptively Balancing Exploration and Exploitation, arXiv 2508.10751",
        api=1,
    )
