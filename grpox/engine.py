"""DeepSpeed ZeRO-3 around the policy: forward, backward, step; and the forward-only engine of the reference.

DeepSpeed would divide by its own idea of accumulation and ranks. Here the step normaliser has already done
that: DeepSpeed is configured with one accumulation step and told the boundary by hand, and the loss is
multiplied by the number of ranks it will average over. The gradient is then the plain sum over tokens.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed warns that it found none, on import

import deepspeed

from grpox.config import RunConfig
from grpox.deepspeed_config import deepspeed_config, reference_config
from grpox.errors import ConfigError, Problem
from grpox.weight_sync import stream_weights
from grpox.world import World

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from grpox.contracts import OptimizerFactory, SchedulerFactory, WeightStream


class Engine:
    """The policy under ZeRO-3, with its optimizer and learning-rate schedule."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: RunConfig,
        world: World,
        total_steps: int,
        optimizer: OptimizerFactory,
        scheduler: SchedulerFactory,
    ) -> None:
        self.world = world
        self.steps = 0
        """Optimizer steps taken: the version of the weights."""
        _skip_op_compilation(world)
        disable_dropout(model)
        if config.train.gradient_checkpointing:
            _enable_checkpointing(model, config)
        model.train()
        torch_optimizer = optimizer.build(model.parameters(), config.train.learning_rate)
        self._deepspeed, self._optimizer, _, self._scheduler = _initialize(
            config,
            model=model,
            optimizer=torch_optimizer,
            lr_scheduler=scheduler.build(torch_optimizer, total_steps),
            config=deepspeed_config(config, world.size),
        )

    @property
    def module(self) -> PreTrainedModel:
        """The policy itself; its parameters are this rank's shards."""
        module: PreTrainedModel = self._deepspeed.module
        return module

    @property
    def learning_rate(self) -> float:
        return float(self._optimizer.param_groups[0]["lr"])

    def __call__(self, **inputs: Any) -> Any:
        return self._deepspeed(**inputs)

    def begin_micro_batch(self, *, last: bool) -> None:
        """Say whether the micro-batch to come is the last of its step; before its forward."""
        self._deepspeed.set_gradient_accumulation_boundary(last)

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient of this rank's share of the loss; shares of all ranks add up."""
        self._deepspeed.backward(loss * self.world.size, scale_wrt_gas=False)

    def step(self) -> float:
        """Clip, update, advance the schedule; returns the gradient's norm before clipping."""
        self._deepspeed.step()
        self.steps += 1
        return float(self._deepspeed.get_global_grad_norm())

    def weights(self) -> WeightStream:
        """The current weights, whole; a collective."""
        return stream_weights(self.module)

    def close(self) -> None:
        """Take DeepSpeed's hooks off the module; the engine is of no use afterwards."""
        self._deepspeed.destroy()


class FrozenEngine:
    """A model for forward passes only, its weights sharded by ZeRO-3: the reference policy."""

    def __init__(self, model: nn.Module, config: RunConfig, world: World) -> None:
        _skip_op_compilation(world)
        model.eval().requires_grad_(False)
        settings = reference_config(config, world.size)
        self._deepspeed, *_ = _initialize(config, model=model, config=settings)

    @property
    def module(self) -> nn.Module:
        """The model itself; its parameters are this rank's shards."""
        module: nn.Module = self._deepspeed.module
        return module

    @torch.no_grad()
    def __call__(self, **inputs: Any) -> Any:
        return self._deepspeed(**inputs)


def disable_dropout(model: nn.Module) -> None:
    """Turn dropout off in training mode too: sampling and training must see one distribution.

    Training mode itself stays, because gradient checkpointing works in no other.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def _enable_checkpointing(model: PreTrainedModel, config: RunConfig) -> None:
    try:
        kwargs = {"use_reentrant": False} | config.train.gradient_checkpointing_kwargs
        model.gradient_checkpointing_enable(kwargs)
    except ValueError as error:
        raise ConfigError(Problem(str(error), "train.gradient_checkpointing", given="true")) from error


def _initialize(run: RunConfig, /, **arguments: Any) -> Any:
    """`deepspeed.initialize`; what the user's own settings break there is told as such."""
    try:
        return deepspeed.initialize(**arguments)
    except Exception as error:
        if not run.deepspeed.settings:
            raise
        what = f"DeepSpeed does not start with these settings: {type(error).__name__}: {error}"
        raise ConfigError(Problem(what, "deepspeed.settings")) from error


def _skip_op_compilation(world: World) -> None:
    """Keep DeepSpeed from compiling its shared-memory collectives on CPU: 35 to 95 s, behind a file lock
    that a killed process leaves for ever."""
    if world.device.type == "cpu":
        deepspeed.ops.__compatible_ops__ = {}
