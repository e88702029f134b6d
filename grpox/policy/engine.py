"""DeepSpeed ZeRO-3 around the policy: forward, backward, step; and the forward-only engine of the reference.

DeepSpeed would divide the gradient by its accumulation steps and ranks, but grpox's step normaliser has already
done so. DeepSpeed is therefore configured with one accumulation step, grpox sets the step boundary, and the
loss is multiplied by the number of ranks that DeepSpeed averages over. The gradient is then the plain sum over
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from grpox.config import RunConfig
from grpox.errors import ConfigError, RunFailed, describe, text_of
from grpox.policy.attention import set_attention
from grpox.policy.batch import ForwardMode
from grpox.policy.deepspeed_config import deepspeed_config, reference_config
from grpox.policy.deepspeed_import import deepspeed, z3_leaf_parameter
from grpox.policy.float32_head import restore_head
from grpox.policy.lora.layers import (
    ADAPTER,
    adapted_layers,
    adapted_weight,
    factors_of,
    parameter_adapters,
    parameters_of,
)
from grpox.policy.randomness import disable_dropout, restore_training
from grpox.policy.rope import fix_rope, longest_sequence
from grpox.policy.scoring_forward import describe_unused_modes, install_scoring_forward, restore_forward
from grpox.policy.weight_stream import stream_adapters, stream_parameters, stream_weights
from grpox.runtime.foreign_code import call
from grpox.runtime.setup import one_processor_each
from grpox.runtime.world import World

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from grpox.contracts import OptimizerFactory, SchedulerFactory, WeightStream
    from grpox.policy.deepspeed_import import CheckpointEngine

_SAMPLED = 4096
"""Smallest sample of weights of a flat tensor that shows if a step changes any of them."""
_NORM_PART = 2**24
"""Number of weights whose squares are summed in float32."""


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
        files: CheckpointEngine | None = None,
    ) -> None:
        """
        Args:
            files: writes and reads the files of checkpoints; default: DeepSpeed's own engine.
        """
        self.world = world
        self.steps = 0
        """Number of steps so far, including skipped ones; the version of the weights."""
        self._learning_rate_factor: float | None = None
        self._attention = model.config._attn_implementation
        disable_dropout(model)
        self.is_adapted = bool(adapted_layers(model))
        """True if adapters are trained."""
        self._base_square: Tensor | None = None
        """Squared norm of the weights that adapters change, f64[]; None until it is needed."""
        if config.train.gradient_checkpointing:
            kwargs = {"use_reentrant": False} | config.train.gradient_checkpointing_kwargs
            try:
                model.gradient_checkpointing_enable(kwargs)
            except ValueError as error:
                raise ConfigError(text_of(error), "train.gradient_checkpointing", given="true") from error
        model.train()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        torch_optimizer = call("optimizer", optimizer.build, trained, config.train.learning_rate)
        settings = deepspeed_config(config, world.size)
        if self.is_adapted:
            # A block of experts would be a leaf. DeepSpeed sums a leaf's gradients before they exist if nothing
            # below the block is trained.
            settings["zero_optimization"].setdefault("leaf_module", {"classes": []})
        self.deepspeed, self._optimizer, _, self._scheduler = _initialize(
            config,
            model=model,
            optimizer=torch_optimizer,
            lr_scheduler=call("scheduler", scheduler.build, torch_optimizer, total_steps),
            config=settings,
        )
        """DeepSpeed's engine."""
        self.module: PreTrainedModel = self.deepspeed.module
        """The policy; its parameters are this rank's shards."""
        _share_master_weights(self._optimizer)
        if files is not None:
            self.deepspeed.checkpoint_engine = files
            # DeepSpeed would save scripts beside the weights, but a checkpoint contains no code.
            self.deepspeed._copy_recovery_script = lambda folder: None
        if self.is_adapted and any(map(z3_leaf_parameter, trained)):
            what = "names modules with adapters, whose gradients DeepSpeed may then sum before they are there"
            raise ConfigError(what, "deepspeed.settings.zero_optimization.leaf_module", allowed="other modules")
        for layer in parameter_adapters(self.module).values():
            # ZeRO-3 gathers the parameters of which it knows that the module's forward pass reads them.
            for factor in parameters_of(layer):
                deepspeed.zero.register_external_parameter(layer.get_base_layer(), factor)
        self.mode = _try_forward_modes(self.deepspeed, config, world)
        self.unused_modes = describe_unused_modes(self.module, config.train, self.mode, world.device)
        """Forward modes that the run allows and does not use, with the reasons; None without any."""

    @property
    def chosen_attention(self) -> str | None:
        """Name of the attention function that replaced the model's own; None if none did."""
        name = str(self.module.config._attn_implementation)
        return None if name == self._attention else name

    @property
    def learning_rate(self) -> float:
        factor = 1.0 if self._learning_rate_factor is None else self._learning_rate_factor
        return float(self._optimizer.param_groups[0]["lr"]) * factor

    def __call__(self, **inputs: Any) -> Any:
        return self.deepspeed(**inputs)

    def begin_micro_batch(self, *, last: bool) -> None:
        """Declare if the next micro-batch is the last of its step; call before its forward pass."""
        self.deepspeed.set_gradient_accumulation_boundary(last)

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient of this rank's part of the loss; the parts of all ranks are summed."""
        self.deepspeed.backward(loss * self.world.size, scale_wrt_gas=False)

    def step(self, loss: Tensor | None = None) -> Tensor:
        """Clip the gradient, update, advance the schedule; return the gradient's norm before clipping, f64[].

        A NaN or infinite gradient is not applied, and the returned norm is infinite: weights, optimizer states
        and schedule stay unchanged on all ranks, and only `steps` increases.

        Args:
            loss: f64[], the same on all ranks; a gradient of a NaN or infinite loss counts as NaN.
        """
        if self.steps == 0:
            _check_parameters_read(self.module)
        optimizer = self.deepspeed.optimizer
        norms = optimizer._get_norm_groups
        if loss is not None:
            # DeepSpeed reads the norm anyway: the loss costs no extra wait. A finite loss adds 0.
            optimizer._get_norm_groups = lambda: [norm + (loss - loss).to(norm) for norm in norms()]
        try:
            self.deepspeed.step()
        finally:
            optimizer.__dict__.pop("_get_norm_groups", None)
        self.steps += 1
        norm: Tensor | float = self.deepspeed.get_global_grad_norm()
        if isinstance(norm, Tensor):
            return norm.to(self.world.device, torch.float64)
        return torch.full((), norm, dtype=torch.float64, device=self.world.device)

    def scale_learning_rate(self, factor: float) -> None:
        """Multiply the schedule's learning rates by `factor` in all later steps."""
        if self._learning_rate_factor is None:
            optimizer = self.deepspeed.optimizer.optimizer  # torch's own, within ZeRO's
            scheduled: list[float] = []

            def scale(*_: Any) -> None:
                scheduled[:] = [group["lr"] for group in optimizer.param_groups]
                for group in optimizer.param_groups:
                    group["lr"] = group["lr"] * self._learning_rate_factor

            def restore(*_: Any) -> None:  # a schedule may go on from the rate that it set last
                for group, rate in zip(optimizer.param_groups, scheduled, strict=True):
                    group["lr"] = rate

            optimizer.register_step_pre_hook(scale)
            optimizer.register_step_post_hook(restore)
        self._learning_rate_factor = factor

    def sample_weights(self) -> list[Tensor]:
        """Copy some thousand of this rank's trained weights; skip weights on nvme."""
        flats = self._optimizer.fp32_partitioned_groups_flat
        return [flat.detach()[:: max(1, len(flat) // _SAMPLED)].clone() for flat in flats]

    def measure_weights(self, before: Sequence[Tensor] | None = None) -> Tensor:
        """Measure the trained weights, f64[3]; a collective. Weights on nvme are left out.

        Args:
            before: the result of `sample_weights` before a step; None: no weight counts as sampled.

        Returns:
            squared norm, which is finite if every weight is and the norm fits into float32; number of sampled
            weights; number of those that have changed.
        """
        flats = [flat.detach() for flat in self._optimizer.fp32_partitioned_groups_flat]
        # A norm and not isfinite(): that would need a mask as long as the weights. In parts, as a sum of
        # billions of float32 loses its small terms.
        norms = [torch.linalg.vector_norm(part) for flat in flats for part in flat.split(_NORM_PART)]
        now = [] if before is None else self.sample_weights()
        changed = [(new != old).sum() for new, old in zip(now, before or (), strict=True)]
        total = torch.zeros(3, dtype=torch.float64, device=self.world.device)
        for norm in norms:
            total[0] += norm.to(total).square()
        total[1] = sum(map(len, now))
        for count in changed:
            total[2] += count.to(total)
        return self.world.reduce(total, dist.ReduceOp.SUM)

    def measure_growth(self) -> Tensor:
        """Measure the weights that adapters change, f64[1]; a collective.

        Returns:
            ``1 + |change|^2 / |W|^2`` over all of them: the squared norm with merged adapters, relative to the
            norm without them, if the change is orthogonal to W.
        """
        layers = adapted_layers(self.module)
        if self._base_square is None:  # frozen, so it is the same in all steps
            named = ((name, adapted_weight(layer)) for name, layer in layers.items())
            weights = (weight for _, weight in stream_parameters(named))
            norms = [torch.linalg.vector_norm(weight, dtype=torch.float64) for weight in weights]
            self._base_square = torch.stack(norms).square().sum()
        factors = (factor for _, factor in stream_adapters(self.module))
        changes = [
            factors_of(layer, down, up).squared_norm(len(down) // layer.r[ADAPTER])
            for layer, down, up in zip(layers.values(), factors, factors, strict=True)
        ]
        return 1 + (torch.stack(changes).sum() / self._base_square).reshape(1).to(self.world.device)

    def weights(self) -> WeightStream:
        """Yield the current whole weights with merged adapters; a collective."""
        return stream_weights(self.module, adapted=self.is_adapted)

    def save(self, folder: Path, name: str) -> None:
        """Write weights, optimizer and schedule to `folder`/`name`, one or more files per rank; a collective.

        With adapters, the frozen weights are left out, because they equal the original model's. `files`, passed
        to the constructor, reports errors of writing.
        """
        self.deepspeed.save_checkpoint(
            str(folder), tag=name, save_latest=False, exclude_frozen_parameters=self.is_adapted
        )

    def load(self, folder: Path, name: str, steps: int) -> None:
        """Read a checkpoint that `save` wrote after `steps` optimizer steps; a collective."""
        loaded, _ = self.deepspeed.load_checkpoint(
            str(folder), tag=name, load_module_strict=not self.is_adapted
        )
        if loaded is None:
            raise RunFailed(f"DeepSpeed finds no checkpoint in {folder / name}")
        self.steps = steps

    def close(self) -> None:
        """Remove all hooks and attributes of DeepSpeed; the engine cannot be used afterwards."""
        self.deepspeed.destroy()
        # `destroy` leaves these. They hold the engine and the shards, and a model with them cannot be pickled.
        self.deepspeed.module_forward_pre_hook.remove()
        self.deepspeed.module_forward_post_hook.remove()
        for module in self.module.modules():
            for name in [name for name in vars(module) if name.startswith("ds_") or name in _LEFT]:
                delattr(module, name)
        restore_forward(self.module)
        restore_head(self.module)
        restore_training(self.module)
        set_attention(self.module, self._attention)
        fix_rope(self.module, None)


_LEFT = (
    *("_external_params", "_original_parameters", "all_parameters"),
    *("applied_pre_backward_ref_cnt", "pre_bwd_fn", "post_bwd_fn"),
)
"""Attributes that ZeRO-3 sets on modules, in addition to names that begin with ``ds_``."""


def _check_parameters_read(model: nn.Module) -> None:
    """Refuse adapters of parameters that the model does not read in the forward pass of their module.

    Such an adapter would have no effect in training, but would be merged.
    """
    adapters = parameter_adapters(model)
    if unread := [name for name, layer in adapters.items() if not layer.is_read]:
        what = "the model does not read this parameter in the forward pass of its own module"
        raise ConfigError(what, "model.lora.target_parameters", given=unread[0], allowed="other parameters")


def _share_master_weights(optimizer: Any) -> None:
    """Let float32 weights be their own master weights, which saves 4 bytes for each weight of a shard.

    DeepSpeed intends this too, but it compares the weights' device with a device's name, and so copies them.
    """
    pairs = zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_partitioned_groups_flat, strict=True)
    for master, weights in pairs:
        if weights is not None:  # not where they are on nvme
            places = [(each.dtype, each.device, each.shape) for each in (master, weights)]
            if places[0] == places[1]:
                master.data = weights.data


class FrozenEngine:
    """The reference policy: a model for forward passes only, with weights sharded by ZeRO-3."""

    def __init__(self, model: PreTrainedModel, config: RunConfig, world: World) -> None:
        model.eval().requires_grad_(False)
        settings = reference_config(config, world.size)
        self._deepspeed, *_ = _initialize(config, model=model, config=settings)
        self.module: nn.Module = self._deepspeed.module
        """The model; its parameters are this rank's shards."""
        self.mode = _try_forward_modes(self._deepspeed, config, world)
        self.unused_modes = describe_unused_modes(model, config.train, self.mode, world.device)
        """The same as `Engine.unused_modes`."""

    @torch.no_grad()
    def __call__(self, **inputs: Any) -> Any:
        return self._deepspeed(**inputs)


def _try_forward_modes(engine: Any, config: RunConfig, world: World) -> ForwardMode:
    """Install the fastest forward mode that agrees with the model's own forward pass; a collective."""
    zero = getattr(engine.optimizer, "parameter_offload", engine.optimizer)
    coordinator = zero.get_param_coordinator()

    def run(**inputs: Any) -> Any:
        try:
            return engine(**inputs)
        finally:
            # ZeRO-3 records the order in which modules run, for prefetching. A trial has no backward pass: its
            # order would be wrong for training, and DeepSpeed caches what follows from the first one.
            if not coordinator.is_invalid_trace():
                coordinator._invalidate_trace()

    names_none = not any("attn_implementation" in key for key in config.model.init)
    longest = longest_sequence(config, engine.module.config)
    mode = install_scoring_forward(engine.module, config.train, run, world, names_none, longest)
    if mode.dependence:
        what = f"log-probabilities depend on the other sequences of a micro-batch: {mode.dependence}"
        allowed = "another model, or by data.max_prompt_length sequences below such numbers of its config.json"
        given = f"{config.model.path}, {type(engine.module).__name__}"
        raise ConfigError(what, "model.path", given=given, allowed=allowed)
    return mode


def _initialize(run: RunConfig, /, **arguments: Any) -> Any:
    """Call `deepspeed.initialize`; if user settings exist, raise its errors as ConfigError."""
    try:
        # On a GPU the copies are not made by gloo, and a thread for each part of a model on the host helps.
        with nullcontext() if torch.cuda.is_available() else one_processor_each():
            return deepspeed.initialize(**arguments)
    except Exception as error:
        if not run.deepspeed.settings:
            raise
        what = f"DeepSpeed cannot start with these settings: {describe(error)}"
        raise ConfigError(what, "deepspeed.settings") from error
