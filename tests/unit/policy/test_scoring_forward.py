"""Architectures that give the same log-probabilities by other ways, and those that keep their own forward."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.small_models import TRAIN, batch, far, gradient_of, model_of

from grpox.config import TrainConfig
from grpox.policy.attention import VARLEN
from grpox.policy.batch import FULL_LOGITS, ForwardMode
from grpox.policy.logprobs import completion_logprobs
from grpox.policy.scoring_forward import describe_unused_modes, install_scoring_forward, restore_forward
from grpox.runtime.world import World

NO_SHARING = TrainConfig(prefix_sharing=False)
SHARED, CHUNKED = ForwardMode(chunked=True, shared_width=32), ForwardMode(chunked=True)
PACKED = ForwardMode(chunked=True, packed=True, by_lengths=True)
TEMPERATURE = 0.8


@pytest.mark.parametrize(
    ("kind", "settings", "ways"),
    [
        ("llama", {}, SHARED),
        ("llama", {"tie_word_embeddings": True}, SHARED),
        ("qwen3", {"head_dim": 8}, SHARED),
        ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4}, SHARED),
        ("cohere", {"logit_scale": 0.25}, SHARED),
        ("granite", {"logits_scaling": 4.0}, SHARED),
        ("gemma2", {"head_dim": 8, "final_logit_softcapping": 2.0}, CHUNKED),  # half its layers are windowed
        ("mistral", {"sliding_window": 2}, CHUNKED),
    ],
)
def test_log_probabilities_entropies_and_gradients_are_those_of_the_models_own_forward(
    kind: str, settings: dict[str, Any], ways: ForwardMode
) -> None:
    plain = model_of(kind, **settings)
    model = copy.deepcopy(plain)
    assert install_scoring_forward(model, TRAIN) == ways
    mask = batch().token_mask
    expected, expected_entropy = completion_logprobs(plain, batch(), TEMPERATURE, entropy_gradient=True)
    found, entropy = completion_logprobs(model, batch(ways), TEMPERATURE, entropy_gradient=True)
    torch.testing.assert_close(found[mask], expected[mask], rtol=0, atol=1e-5)
    torch.testing.assert_close(entropy[mask], expected_entropy[mask], rtol=0, atol=1e-5)
    upstream, of_entropy = torch.randn(2, *found.shape, dtype=torch.float64) * mask
    for pair in ((found, entropy), (expected, expected_entropy)):
        (pair[0] * upstream + pair[1] * of_entropy).sum().backward()
    assert far(gradient_of(model), gradient_of(plain)) < 1e-6
    for each, mode in ((plain, FULL_LOGITS), (model, ways)):
        found, entropy = completion_logprobs(each, batch(mode), TEMPERATURE)
        assert (found.requires_grad, entropy.requires_grad) == (True, False)  # it was not asked for


def test_a_head_that_does_more_than_its_configuration_says_keeps_its_forward() -> None:
    model = model_of("llama")
    own = model.forward

    def halved(*args: Any, **kwargs: Any) -> Any:
        output = own(*args, **kwargs)
        output.logits = output.logits / 2
        return output

    model.forward = halved  # type: ignore[method-assign]
    assert install_scoring_forward(model, TRAIN) == FULL_LOGITS


def test_weights_that_are_not_finite_change_nothing() -> None:
    model = model_of("llama")
    model.get_output_embeddings().weight.data[:] = torch.nan
    assert install_scoring_forward(model, TRAIN) == FULL_LOGITS
    assert "forward" not in vars(model)


def test_recurrent_layers_and_attention_without_masks_keep_a_row_for_each_sequence() -> None:
    assert install_scoring_forward(model_of("mamba", torch.float32), TRAIN) == CHUNKED
    model = model_of("llama", torch.float32)
    model.set_attn_implementation("eager")
    assert install_scoring_forward(model, TRAIN) == CHUNKED


def test_a_model_that_sees_beyond_its_sequence_is_not_packed() -> None:
    model = model_of("llama")
    model.set_attn_implementation(VARLEN)
    layers = model.base_model.layers
    layers[0].register_forward_pre_hook(lambda layer, args: (args[0] + args[0].roll(1, dims=1), *args[1:]))
    mode = install_scoring_forward(model, TrainConfig(prefix_sharing=False))
    assert not mode.packed
    assert mode.failures[0].startswith("the trial of train.packing with grpox_varlen gave other numbers: ")


def test_a_prepared_model_still_generates_and_can_forget() -> None:
    model = model_of("llama")
    ids = torch.tensor([[5, 6, 7]])
    before = model.generate(ids, max_new_tokens=5, do_sample=False)
    install_scoring_forward(model, TRAIN)
    assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False), before)
    restore_forward(model)
    assert "forward" not in vars(model)
    assert "forward" not in vars(model.get_output_embeddings())


@pytest.mark.parametrize("raises", [True, False])
def test_a_trial_that_fails_is_told_with_its_error_or_as_other_numbers(raises: bool) -> None:
    model = model_of("llama")
    own = model.base_model.forward

    def forward(*args: Any, attention_mask: Any = None, **inputs: Any) -> Any:
        is_shared = getattr(attention_mask, "ndim", 0) == 4
        if is_shared and raises:
            raise RuntimeError("no mask of four dimensions")
        return own(*args, attention_mask=None if is_shared else attention_mask, **inputs)

    model.base_model.forward = forward
    ways = install_scoring_forward(model, TRAIN)
    assert ways == CHUNKED
    [failure] = ways.failures
    told = "raised RuntimeError: no mask of four dimensions" if raises else "gave other numbers: "
    assert failure.removeprefix("the trial of ").startswith(f"train.prefix_sharing with sdpa {told}")
    assert failure in str(describe_unused_modes(model, TRAIN, ways))
    assert install_scoring_forward(model_of("llama"), TRAIN).failures == ()


def test_a_model_whose_own_forward_fails_says_so_and_has_no_mode() -> None:
    model = model_of("llama")
    model.config._attn_implementation = "flash_attention_2"

    def forward(*args: Any, **inputs: Any) -> Any:
        raise RuntimeError("FlashAttention only supports CUDA")

    model.base_model.forward = forward
    mode = install_scoring_forward(model, TRAIN)
    assert mode == FULL_LOGITS
    reason = str(describe_unused_modes(model, TRAIN, mode))
    assert "cannot use train.chunked_logprobs and train.packing: " in reason
    assert "model.init.attn_implementation is flash_attention_2" in reason
    raised = "the trial of the model's own forward pass raised RuntimeError: FlashAttention only supports CUDA"
    assert raised in reason


def test_a_mode_that_a_run_asks_for_in_vain_is_named() -> None:
    model = model_of("llama")
    without, insists = TrainConfig(chunked_logprobs=False), TrainConfig(prefix_sharing=True)
    for train, mode in ((TRAIN, SHARED), (NO_SHARING, CHUNKED), (without, FULL_LOGITS)):
        assert describe_unused_modes(model, train, mode) is None
    sharing = "LlamaForCausalLM cannot use train.prefix_sharing:"
    assert str(describe_unused_modes(model, TRAIN, CHUNKED)).startswith(sharing)
    both = "cannot use train.chunked_logprobs and train.prefix_sharing"
    assert both in str(describe_unused_modes(model, TRAIN, FULL_LOGITS))
    # Flash attention cannot share prompts, and says so where the run insists.
    model.config._attn_implementation = "kernels-community/flash-attn2"
    assert str(describe_unused_modes(model, insists, PACKED)).startswith(sharing)
    assert describe_unused_modes(model, TRAIN, PACKED) is None
    assert describe_unused_modes(model, NO_SHARING, PACKED) is None


class WithFailingRank(World):
    """A rank beside one whose trials all fail."""

    def reduce(self, values: torch.Tensor, op: Any) -> torch.Tensor:
        assert op == torch.distributed.ReduceOp.MIN
        return torch.minimum(values, torch.zeros_like(values))


def test_a_mode_has_to_agree_on_every_rank() -> None:
    model, world = model_of("llama"), WithFailingRank(0, 2, torch.device("cpu"))
    mode = install_scoring_forward(model, TRAIN, world=world)
    assert mode == FULL_LOGITS
    assert mode.failures == ("the trial of the model's own forward pass failed on another rank",)
