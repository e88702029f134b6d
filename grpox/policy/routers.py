"""The load-balancing loss of models with experts, from the router logits of the forward pass.

Source: Fedus et al., Switch Transformers (arXiv 2101.03961), equations 4 to 6, as transformers computes it for
the model: E sum_e f_e P_e over all layers, where f_e is the mean number of times that a token chose expert e,
and P_e the mean probability of e.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from grpox.errors import ConfigError
from grpox.policy.batch import PackedBatch

KEY = "train.router_aux_loss_coef"


def check_routers(config: PreTrainedConfig, coefficient: float) -> None:
    """Refuse a weight of the load-balancing loss for a model without routers that return their logits.

    Raises:
        ConfigError: the configuration has no such routers.
    """
    if coefficient and not hasattr(config.get_text_config(), "output_router_logits"):
        raise _no_routers(config.model_type, coefficient)


def _no_routers(model: str, coefficient: float) -> ConfigError:
    what = f"the model ({model}) has no routers with a load-balancing loss in transformers"
    return ConfigError(
        what, KEY, given=f"{coefficient:g}", allowed="0, or a model such as qwen3_moe or mixtral"
    )


class RouterBalance:
    """The load-balancing loss of the forward passes of one model."""

    def __init__(self, model: PreTrainedModel, coefficient: float) -> None:
        """
        Args:
            model: the whole or sharded model.
            coefficient: weight of the loss, above 0.

        Raises:
            ConfigError: the model has no such loss.
        """
        check_routers(model.config, coefficient)
        function = getattr(sys.modules[type(model).__module__], "load_balancing_loss_func", None)
        experts, chosen = (getattr(model, name, None) for name in ("num_experts", "num_experts_per_tok"))
        if function is None or experts is None or chosen is None:
            raise _no_routers(type(model).__name__, coefficient)
        self.coefficient = coefficient
        self._function: Callable[..., Tensor] = function
        self._experts: int = experts
        self._chosen: int = chosen
        self._body = model.base_model
        self._logits: tuple[Tensor, ...] = ()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the router logits of the forward pass in this block, with gradient."""

        def ask(_: Any, args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
            return args, {**kwargs, "output_router_logits": True}

        def keep(_: Any, args: Any, output: Any) -> None:
            self._logits = tuple(output.router_logits)

        before = self._body.register_forward_pre_hook(ask, with_kwargs=True)
        after = self._body.register_forward_hook(keep)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def take(self, batch: PackedBatch) -> Tensor:
        """Return the loss of the recorded pass over a micro-batch, f32[], and forget the logits.

        In every forward mode it is the loss of the padded sequences, each with its prompt.
        """
        positions = batch.attended_positions
        logits, self._logits = self._logits, ()
        rows = tuple(each.flatten(0, -2).index_select(0, positions) for each in logits)
        return self._function(rows, self._experts, self._chosen)
