"""Attention by lengths of sequences: on a CPU, where it goes by sequence, it equals that of padded rows."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch
from support.small_models import batch, far, gradient_of, model_of
from torch.nn.attention import varlen
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask
from transformers.modeling_flash_attention_utils import FLASH_ATTN_KERNEL_FALLBACK

from grpox.config import TrainConfig
from grpox.policy import attention
from grpox.policy.attention import VARLEN, attend_within, prefers_varlen, probe_kernel, set_attention
from grpox.policy.batch import FULL_LOGITS, ForwardMode, collate
from grpox.policy.logprobs import completion_logprobs
from grpox.policy.scoring_forward import describe_unused_modes, install_scoring_forward

CPU, META = torch.device("cpu"), torch.device("meta")
PACKED = ForwardMode(chunked=True, packed=True, by_lengths=True)
ROWS = ForwardMode(chunked=True, by_lengths=True)
SHARED = ForwardMode(chunked=True, shared_width=32, by_lengths=True)
PACKS = TrainConfig(prefix_sharing=False)
MODES = [
    (PACKS, PACKED),
    (TrainConfig(prefix_sharing="auto"), PACKED),
    (TrainConfig(prefix_sharing=True), SHARED),
    (TrainConfig(prefix_sharing=False, packing=False), ROWS),
]
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4}
FLASH = sorted(
    {name for name in AttentionInterface._global_mapping if name.startswith("flash")}
    | {"kernels-community/flash-attn3", *FLASH_ATTN_KERNEL_FALLBACK.values()}
)
"""The names under which transformers has flash kernels: of packages, and of a hub in their place."""
PRECISIONS = [(torch.float64, 1e-12), (torch.float32, 1e-6)]
"""gpt2 computes all in its own precision, so that the order of its sums is the only difference."""


def by_lengths(model: Any) -> Any:
    model = copy.deepcopy(model)
    set_attention(model, VARLEN)
    return model


def scored(model: Any, mode: ForwardMode) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities of the tokens and the gradient of their weighted sum."""
    sequences = batch(mode)
    torch.manual_seed(0)
    logprobs, _ = completion_logprobs(model, sequences, 0.8)
    upstream = torch.randn(logprobs.shape, dtype=logprobs.dtype) * sequences.token_mask
    (logprobs * upstream).sum().backward()
    return logprobs.detach()[sequences.token_mask], gradient_of(model)


@pytest.mark.parametrize(("dtype", "most"), PRECISIONS)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("train", "mode"), MODES)
def test_log_probabilities_and_gradients_are_those_of_padded_sequences(
    train: TrainConfig, mode: ForwardMode, checkpointing: bool, dtype: torch.dtype, most: float
) -> None:
    plain = model_of("gpt2", dtype, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **GPT2)
    model = by_lengths(plain)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    assert install_scoring_forward(model, train) == mode
    expected, actual = scored(plain, FULL_LOGITS), scored(model, mode)
    torch.testing.assert_close(actual[0], expected[0], rtol=0, atol=most * 10)  # they are about -5
    assert far(actual[1], expected[1]) < most


@pytest.mark.parametrize("mode", [PACKED, ROWS])
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("llama", {}),
        ("mistral", {"sliding_window": 3}),
        ("gemma3_text", {"head_dim": 8, "sliding_window": 3, "query_pre_attn_scalar": 8}),
    ],
)
def test_grouped_heads_and_windows_are_those_of_padded_sequences(
    kind: str, settings: dict[str, Any], mode: ForwardMode
) -> None:
    plain = model_of(kind, **settings)
    model = by_lengths(plain)
    assert install_scoring_forward(model, TrainConfig(prefix_sharing=False, packing=mode.packed)) == mode
    expected, actual = scored(plain, FULL_LOGITS), scored(model, mode)
    torch.testing.assert_close(actual[0], expected[0], rtol=0, atol=1e-5)
    assert far(actual[1], expected[1]) < 2e-6


def test_capped_attention_is_refused_by_name_and_the_model_keeps_rows() -> None:
    """sdpa leaves the cap out, as transformers does; the lengths would hide that."""
    model = by_lengths(model_of("gemma2", head_dim=8, sliding_window=3, attn_logit_softcapping=50.0))
    mode = install_scoring_forward(model, PACKS)
    assert mode == FULL_LOGITS
    assert "train.packing with grpox_varlen raised ValueError: grpox_varlen does not support softcap" in str(
        mode.failures
    )


@pytest.mark.parametrize("kind", ["chunked_attention", "linear_attention"])
def test_layers_that_could_see_beyond_a_length_are_not_tried(kind: str) -> None:
    model = by_lengths(model_of("llama"))
    model.config.layer_types = ["full_attention", kind]
    mode = install_scoring_forward(model, PACKS)
    assert (mode.packed, mode.by_lengths) == (False, False)
    reason = f"model.init.attn_implementation is grpox_varlen, with layers of type {kind}"
    assert str(describe_unused_modes(model, PACKS, mode)).endswith(f"cannot use train.packing: {reason}")


def test_a_padded_model_still_generates_the_same() -> None:
    plain = model_of("llama")
    ids, mask = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 5]]), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    both = [
        model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
        for model in (plain, by_lengths(plain))
    ]
    assert torch.equal(*both)


@pytest.mark.parametrize("mode", [PACKED, ROWS])
def test_a_pass_reads_no_value_of_a_tensor(mode: ForwardMode) -> None:
    """On the meta device values cannot be read; torch's kernel has a form for it, which the pass runs."""
    model = by_lengths(model_of("llama", torch.bfloat16, head_dim=8))
    assert install_scoring_forward(model, TrainConfig(prefix_sharing=False, packing=mode.packed)) == mode
    on_meta = collate(batch().samples, META, mode)
    logprobs, _ = completion_logprobs(model.to(META), on_meta, 1.0)
    assert logprobs.shape == on_meta.token_mask.shape


@pytest.mark.parametrize("name", FLASH)
def test_flash_kernels_receive_lengths_and_no_mask(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels need CUDA: in their place is attention by sequence, called as transformers calls them."""
    longest: list[int] = []

    def kernel(module: Any, query: Any, key: Any, value: Any, mask: Any, **others: Any) -> Any:
        if mask is None:
            longest.append(others["max_length_k"])
            assert others["cu_seq_lens_q"] is others["cu_seq_lens_k"]
            return attention.attend(module, query, key, value, None, **others)
        padded = (mask[:, None, None] & torch.ones(mask.shape[1], mask.shape[1]).tril().bool()).bool()
        return attention.attend(module, query, key, value, padded, **others)

    monkeypatch.setitem(AttentionInterface._global_mapping, name, kernel)
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, name, flash_attention_mask)
    plain = model_of("llama")
    model = copy.deepcopy(plain)
    model.config._attn_implementation_internal = name
    assert install_scoring_forward(model, TrainConfig()) == PACKED
    longest.clear()
    with monkeypatch.context() as without:
        for owner, reads in product((torch, torch.Tensor), ("all", "any", "nonzero", "item")):
            without.setattr(owner, reads, None, raising=False)
        completion_logprobs(model, batch(PACKED), 0.8)
    assert longest == [7, 7]  # once in each layer: the longest of the five sequences
    actual, gradient = scored(model, PACKED)
    expected = scored(plain, FULL_LOGITS)
    torch.testing.assert_close(actual, expected[0], rtol=0, atol=1e-5)
    assert far(gradient, expected[1]) < 1e-6


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("accepts_groups", [False, True])
def test_torchs_kernel_gets_groups_or_repeated_heads(
    accepts_groups: bool, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older releases of torch lack `enable_gqa`."""
    calls: list[tuple[Any, ...]] = []

    def kernel(query: Any, key: Any, value: Any, *others: Any, **options: Any) -> Any:
        calls.append((tuple(key.shape), tuple(value.shape), others[2:], options))
        return varlen.varlen_attn(query, key, value, *others, **options)

    monkeypatch.setattr(attention, "_torch_kernel", lambda: (kernel, accepts_groups))
    query, key = torch.empty(6, 4, 8, device=META), torch.empty(6, 2, 8, device=META)
    starts = torch.empty(3, dtype=torch.int32, device=META)
    assert attend_within(query, key, key, starts, 4, 0.5, window).shape == (6, 4, 8)
    options = {"scale": 0.5, "window_size": (-1 if window is None else 1, 0)}
    heads = 2 if accepts_groups else 4
    grouped = {"enable_gqa": True} if accepts_groups else {}
    assert calls == [((6, heads, 8), (6, heads, 8), (4, 4), options | grouped)]


def test_a_window_counts_the_position_itself() -> None:
    """With equal scores attention is the mean of the values: of two positions from the second on."""
    value = torch.tensor([1.0, 3.0, 5.0, 10.0]).view(4, 1, 1)
    equal = torch.zeros(4, 1, 1)
    starts = torch.tensor([0, 3, 4], dtype=torch.int32)
    assert attend_within(equal, equal, value, starts, 3, None, 2).flatten().tolist() == [1, 2, 4, 10]
    assert attend_within(equal, equal, value, starts, 3).flatten().tolist() == [1, 2, 3, 10]


def test_a_kernel_with_a_wrong_gradient_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama", torch.bfloat16)
    probe_kernel(model, CPU)

    def doubled(*inputs: Any) -> Any:
        right = attention._by_sequence(*inputs[:3], inputs[3].tolist(), None, None)
        return right.detach() + 2 * (right - right.detach())

    monkeypatch.setattr(attention, "attend_within", doubled)
    with pytest.raises(ValueError, match="the kernel of grpox_varlen is off by 1 of its result"):
        probe_kernel(model, CPU)


def test_it_replaces_sdpa_on_cuda_in_half_precision() -> None:
    model, preferred = model_of("llama"), []
    for device, dtype, name in product(("cuda", "cpu"), (torch.bfloat16, torch.float32), ("sdpa", "eager")):
        model.to(dtype).config._attn_implementation = name
        if prefers_varlen(model, torch.device(device)):
            preferred.append((device, dtype, name))
    assert preferred == [("cuda", torch.bfloat16, "sdpa")]


@pytest.mark.parametrize("fails", [False, True])
def test_where_it_is_preferred_it_is_used_if_the_trial_agrees(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on CUDA, but with the device's form of it: the choice is made by what the trial gives."""
    monkeypatch.setattr("grpox.policy.scoring_forward.prefers_varlen", lambda model, device: True)
    monkeypatch.setattr("grpox.policy.scoring_forward.shares_by_default", lambda model, device: False)
    if fails:

        def broken(*inputs: Any) -> Any:
            raise RuntimeError("no kernel image is available")

        monkeypatch.setattr(attention, "attend_within", broken)
    model = model_of("llama")
    assert install_scoring_forward(copy.deepcopy(model), TrainConfig()) == ForwardMode(chunked=True)
    mode = install_scoring_forward(model, TrainConfig(), chooses_attention=True)
    assert mode == (ForwardMode(chunked=True) if fails else PACKED)
    assert model.config._attn_implementation == ("sdpa" if fails else VARLEN)
    raised = "the trial of attention by grpox_varlen raised RuntimeError: no kernel image is available"
    assert mode.failures == ((raised,) if fails else ())
