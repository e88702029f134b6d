"""Offers the built-in environments: calculator, guess and lake."""

from __future__ import annotations

from grpox import ComponentSpec, hookimpl
from grpox.contracts import Capability

ENVIRONMENTS = (
    ComponentSpec(
        name="calculator",
        target="grpox_environments.calculator:Calculator",
        config="grpox_environments.configs:CalculatorConfig",
        summary="Sums, with a calculator that costs something",
    ),
    ComponentSpec(
        name="guess",
        target="grpox_environments.guess:Guess",
        config="grpox_environments.configs:GuessConfig",
        summary='A number to guess, with the answers "higher" and "lower"',
    ),
    ComponentSpec(
        name="lake",
        target="grpox_environments.lake:Lake",
        config="grpox_environments.configs:LakeConfig",
        provides=(Capability.EPISODE_REWARD, Capability.TURN_REWARDS, Capability.STATE_KEYS),
        summary="A frozen lake with holes as a map of text, crossed one move a turn",
    ),
)


@hookimpl
def grpox_environments() -> tuple[ComponentSpec, ...]:
    """Offer environments in plain Python."""
    return ENVIRONMENTS
