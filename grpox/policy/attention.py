"""Attention over sequences in one row, separated by their lengths instead of a mask.

On CUDA it is torch's own FlashAttention for variable lengths (arXiv 2307.08691); on a CPU, one sequence after
the other goes through scaled dot-product attention, with the same result. transformers knows both as
`grpox_varlen`. The lengths come from the host, and the mask of the model is a placeholder: transformers then
builds no mask, and reads no positions back from the device to find where sequences begin.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VARLEN = "grpox_varlen"
"""Name in transformers' AttentionInterface, and in `model.init.attn_implementation`."""
KINDS = {"full_attention", "sliding_attention"}
"""Types of layers that see only positions of their own sequence when its length is given."""
UNSUPPORTED = ("softcap", "s_aux", "position_bias", "cache")
"""Arguments of transformers' attention functions that change the result; `grpox_varlen` lacks them."""
PROBED = (3, 17, 1)
"""Lengths of the sequences on which a kernel is compared with attention by sequence."""


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend within sequences of these lengths; without lengths, use transformers' sdpa with its mask.

    Args:
        query: [R, H, L, D]
        key, value: [R, K, L, D], K divides H
        cu_seq_lens_q: i32[S + 1], where each sequence begins in the R * L positions, then R * L.
        max_length_q: length of the longest sequence.

    Returns:
        [R, L, H, D]

    Raises:
        ValueError: the model asks for a kind of attention that `grpox_varlen` lacks.
    """
    if cu_seq_lens_q is None or max_length_q is None:
        result: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **others
        )
        return result
    lacking = [name for name in UNSUPPORTED if others.get(name) is not None]
    lacking += ["dropout"] if others.get("dropout") else []
    lacking += [] if getattr(module, "is_causal", True) else ["attention to later positions"]
    if lacking:
        raise ValueError(f"{VARLEN} does not support {', '.join(lacking)}")
    query_rows, keys, values = (states.transpose(1, 2).flatten(0, 1) for states in (query, key, value))
    window: int | None = others.get("sliding_window")
    attended = attend_within(query_rows, keys, values, cu_seq_lens_q, max_length_q, scaling, window)
    return attended.reshape(query.shape[0], query.shape[2], *attended.shape[1:]), None


def attend_within(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    longest: int,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Attend causally within each sequence: one sequence after the other on a CPU, else by torch's kernel.

    Args:
        query: [N, H, D]
        key, value: [N, K, D]
        starts: i32[S + 1], see `attend`.
        window: number of last positions that a position sees, itself included; None: all.

    Returns:
        [N, H, D]
    """
    if query.device.type == "cpu":
        return _by_sequence(query, key, value, starts.tolist(), scale, window)
    kernel, accepts_groups = _torch_kernel()
    options: dict[str, Any] = {}
    if (repeats := query.shape[1] // key.shape[1]) > 1:
        if accepts_groups:
            options["enable_gqa"] = True
        else:
            key, value = (states.repeat_interleave(repeats, dim=1) for states in (key, value))
    before = -1 if window is None else window - 1
    attended: Tensor = kernel(
        query, key, value, starts, starts, longest, longest, scale=scale, window_size=(before, 0), **options
    )
    return attended


def _by_sequence(
    query: Tensor, key: Tensor, value: Tensor, starts: list[int], scale: float | None, window: int | None
) -> Tensor:
    is_grouped = query.shape[1] != key.shape[1]
    parts = []
    for begin, end in itertools.pairwise(starts):
        one, keys, values = (states[begin:end].transpose(0, 1).unsqueeze(0) for states in (query, key, value))
        mask = None
        if window is not None and window < end - begin:
            position = torch.arange(end - begin, device=query.device)
            distance = position.unsqueeze(1) - position
            mask = (distance >= 0) & (distance < window)
        part = scaled_dot_product_attention(
            one, keys, values, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=is_grouped
        )
        parts.append(part.squeeze(0).transpose(0, 1))
    return torch.cat(parts)


@functools.cache
def _torch_kernel() -> tuple[Callable[..., Any], bool]:
    """Import torch's kernel for variable lengths; True if it accepts fewer heads of keys than of queries."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn, "enable_gqa" in inspect.signature(varlen_attn).parameters


def takes_lengths(model: PreTrainedModel) -> bool:
    """Return True if the model's attention accepts lengths of sequences.

    `grpox_varlen` does, and so do flash kernels under any of transformers' names, such as flash_attention_2 and
    kernels-community/flash-attn2.
    """
    name = str(model.config._attn_implementation)
    return name == VARLEN or "flash" in name


def layers_beyond_lengths(model: PreTrainedModel) -> list[str]:
    """List the model's types of layers that may see beyond their sequence though its length is given."""
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or []
    return sorted(set(kinds) - KINDS)


def prefers_varlen(model: PreTrainedModel, device: torch.device) -> bool:
    """Return True if `grpox_varlen` should replace transformers' default: on CUDA, for half precision."""
    is_half = model.dtype in (torch.bfloat16, torch.float16)
    return device.type == "cuda" and is_half and model.config._attn_implementation == "sdpa"


def shares_by_default(model: PreTrainedModel, device: torch.device) -> bool:
    """Return True if shared prompts save time: on a CPU, unless attention accepts lengths.

    On CUDA their mask rules out the flash kernels. We did not measure which of the two is faster.
    """
    return device.type == "cpu" and not takes_lengths(model)


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Replace the attention function of a model.

    Raises:
        ValueError: the model's code does not let transformers choose its attention.
    """
    if model.config._attn_implementation == name:
        return
    model.set_attn_implementation(name)
    if (actual := model.config._attn_implementation) != name:
        raise ValueError(f"{type(model).__name__} does not accept {name}, and keeps {actual}")


def probe_kernel(model: PreTrainedModel, device: torch.device) -> None:
    """Compare value and gradient of the device's kernel with attention by sequence, for the model's heads.

    A kernel can support sizes of heads in the forward pass that it does not support in the backward pass.

    Raises:
        ValueError: they differ by more than their precision explains.
    """
    config = model.config.get_text_config()
    heads = int(config.num_attention_heads)
    groups = int(getattr(config, "num_key_value_heads", None) or heads)
    width = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    starts = [0, *itertools.accumulate(PROBED)]
    generator = torch.Generator().manual_seed(0)

    def draw(count: int) -> Tensor:
        return torch.randn(starts[-1], count, width, generator=generator).to(device, model.dtype)

    inputs, upstream = [draw(heads), draw(groups), draw(groups)], draw(heads)
    places = torch.tensor(starts, dtype=torch.int32, device=device)
    with torch.enable_grad():
        query, key, value = (states.requires_grad_() for states in inputs)
        actual = attend_within(query, key, value, places, max(PROBED))
        gradients = torch.autograd.grad(actual, (query, key, value), upstream)
        wide = torch.promote_types(model.dtype, torch.float32)
        query, key, value = (states.detach().to(wide).requires_grad_() for states in inputs)
        expected = _by_sequence(query, key, value, starts, None, None)
        by_sequence = torch.autograd.grad(expected, (query, key, value), upstream.to(wide))
    far = 32 * torch.finfo(model.dtype).eps
    pairs = zip((actual.detach(), *gradients), (expected.detach(), *by_sequence), strict=True)
    worst = max(float((one - other).norm() / other.norm()) for one, other in pairs)
    if not worst <= far:
        raise ValueError(f"the kernel of {VARLEN} is off by {worst:.2g} of its result, more than {far:.2g}")


def accept_placeholder(name: str) -> None:
    """Let the flash kernel that transformers calls `name` ignore the placeholder of a `PackedBatch`.

    Flash kernels have no masks of four dimensions, so no other call changes.
    """
    own = ALL_ATTENTION_FUNCTIONS.get(name)
    if own is None or hasattr(own, "ignores_placeholder"):
        return

    @functools.wraps(own)
    def attend_by_lengths(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **others: Any,
    ) -> Any:
        is_placeholder = attention_mask is not None and attention_mask.ndim == 4
        if is_placeholder and others.get("cu_seq_lens_q") is not None:
            attention_mask = None
        return own(module, query, key, value, attention_mask, **others)

    vars(attend_by_lengths)["ignores_placeholder"] = True
    AttentionInterface.register(name, attend_by_lengths)


AttentionInterface.register(VARLEN, attend)
AttentionMaskInterface.register(VARLEN, sdpa_mask)
