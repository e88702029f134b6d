"""The load-balancing loss of models with experts, in every forward mode: transformers' own, and by hand."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.architectures import OWN
from support.problems import problem_of
from support.small_models import batch, far, gradient_of, model_of
from torch import Tensor

from grpox.config import TrainConfig
from grpox.errors import ConfigError
from grpox.policy.batch import FULL_LOGITS
from grpox.policy.logprobs import completion_logprobs
from grpox.policy.routers import RouterBalance, check_routers
from grpox.policy.scoring_forward import install_scoring_forward
from grpox.update.objective import StepLoss
from grpox.update.packing import StepTotals
from grpox.update.policy_update import forward_pass
from grpox_corrections.corrections import NoCorrection
from grpox_losses.configs import ClippedConfig
from grpox_losses.losses import Dapo

KINDS = ("qwen3_moe", "mixtral")
MODES = {
    "full logits": TrainConfig(chunked_logprobs=False),
    "chunked": TrainConfig(packing=False, prefix_sharing=False),
    "packed": TrainConfig(prefix_sharing=False),
    "shared": TrainConfig(prefix_sharing=True),
}


def moe_of(kind: str) -> Any:
    return model_of(kind, dtype=torch.float32, **OWN[kind])


def own_loss(model: Any) -> Tensor:
    """The loss that transformers computes of the padded batch."""
    loss: Tensor = model(**batch().model_inputs(), output_router_logits=True, use_cache=False).aux_loss
    return loss


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_and_its_gradient_are_those_of_transformers(kind: str, mode: str) -> None:
    plain = moe_of(kind)
    model = copy.deepcopy(plain)
    if mode == "packed":
        model.set_attn_implementation("grpox_varlen")
    installed = install_scoring_forward(model, MODES[mode])
    assert (installed == FULL_LOGITS, installed.packed, bool(installed.shared_width)) == (
        mode == "full logits",
        mode == "packed",
        mode == "shared",
    )
    routers = RouterBalance(model, 0.1)
    with routers.recording():
        completion_logprobs(model, given := batch(installed), 0.8)
    found, expected = routers.take(given), own_loss(plain)
    assert float(found) == pytest.approx(float(expected), rel=1e-6)
    found.backward()  # type: ignore[no-untyped-call]
    expected.backward()  # type: ignore[no-untyped-call]
    assert far(gradient_of(model), gradient_of(plain)) < 1e-5


def test_the_loss_by_hand() -> None:
    """E sum_e f_e P_e, counted token by token over both layers."""
    model, given = moe_of("qwen3_moe"), batch()
    routers = RouterBalance(model, 0.1)
    with routers.recording():
        completion_logprobs(model, given, 1.0)
    chosen, probable, tokens = [0] * 4, [0.0] * 4, 0
    for logits in routers._logits:
        for row, attended in zip(logits, given.model_inputs()["attention_mask"].flatten(), strict=True):
            if attended:
                probabilities = row.softmax(-1).tolist()
                for expert in sorted(range(4), key=probabilities.__getitem__)[-2:]:
                    chosen[expert] += 1
                probable = [sum(pair) for pair in zip(probable, probabilities, strict=True)]
                tokens += 1
    assert tokens == 2 * sum(map(len, given.samples))
    by_hand = 4 * sum(f / tokens * p / tokens for f, p in zip(chosen, probable, strict=True))
    assert float(routers.take(given)) == pytest.approx(by_hand, rel=1e-5)


def test_the_term_is_weighted_by_the_tokens_of_the_micro_batch() -> None:
    model, given = moe_of("qwen3_moe"), batch()
    step_loss = StepLoss(Dapo(ClippedConfig()), NoCorrection())
    totals = StepTotals(
        tokens=2 * int(given.token_mask.sum()), sequences=10, micro_batches=2, max_completion_length=8
    )
    without = forward_pass(model, given, step_loss, totals, 0.8)
    found = forward_pass(model, given, step_loss, totals, 0.8, routers=RouterBalance(model, 0.3))
    half = float(own_loss(model)) / 2
    assert found.router_share is not None
    assert found.policy_share is not None
    assert float(found.router_share) == pytest.approx(half, rel=1e-6)
    assert float(found.policy_share) == pytest.approx(float(without.loss), abs=1e-6)
    assert float(found.loss - without.loss) == pytest.approx(0.3 * half, rel=1e-5)
    assert without.router_share is None


def test_a_forward_outside_records_nothing() -> None:
    model = moe_of("mixtral")
    routers = RouterBalance(model, 0.1)
    with routers.recording():
        pass
    assert model(input_ids=torch.tensor([[5, 6]])).router_logits is None
    assert routers._logits == ()


def test_a_model_without_routers_is_refused() -> None:
    llama = model_of("llama")
    check_routers(llama.config, 0.0)
    problem = problem_of(check_routers, llama.config, 0.1)
    assert (problem.key, problem.given) == ("train.router_aux_loss_coef", "0.1")
    assert "llama" in str(problem).lower()
    # Routers alone do not help: this one balances its experts by a bias, and has no such loss.
    glm = model_of("glm4_moe", n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, n_group=1)
    with pytest.raises(ConfigError, match=r"glm4_moe|Glm4Moe"):
        RouterBalance(glm, 0.1)
