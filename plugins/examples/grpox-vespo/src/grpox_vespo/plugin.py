"""Describe this plugin to grpox in strings, so that listing it imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterable

from grpox import ComponentSpec, hookimpl

TOKEN_WEIGHTS = "token-weights"
"""Capability of a correction with one R for each token. The loss multiplies R over a sequence's tokens: an R of
the whole sequence would count once for each of them."""


@hookimpl
def grpox_losses() -> Iterable[ComponentSpec]:
    """The loss, which is refused in a run without a correction for it."""
    yield ComponentSpec(
        name="vespo",
        target="grpox_vespo.loss:VespoLoss",
        config="grpox_vespo.config:VespoLossConfig",
        summary="Policy gradient weighted by a soft function of the sequence's whole importance weight",
        needs=(TOKEN_WEIGHTS,),
        formula="-sg[phi(W)] A log pi, phi(W) = W^k exp(lambda (1 - W)), W = prod_t R pi/pi_old, "
        "k and lambda by the sign of A; sum_i,t / N_tok",
        source="Variational Sequence-Level Soft Policy Optimization, arXiv 2602.10693",
        api=1,
    )


@hookimpl
def grpox_corrections() -> Iterable[ComponentSpec]:
    """The correction for it; another that provides the same will do."""
    yield ComponentSpec(
        name="vespo",
        target="grpox_vespo.correction:VespoCorrection",
        config="grpox_vespo.config:VespoCorrectionConfig",
        summary="Each token's whole importance weight, for a loss that bounds it: vespo",
        needs=("logprobs",),
        provides=(TOKEN_WEIGHTS,),
        formula="R = exp(d), d = log pi_old - log mu",
        source="Variational Sequence-Level Soft Policy Optimization, arXiv 2602.10693",
        api=1,
    )
