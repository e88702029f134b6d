"""A run from Python: `Run` takes its steps one by one, `train` takes all of them."""

from __future__ import annotations

import grpox.runtime.quick_transformers  # noqa: F401 # isort: skip # before transformers itself

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from inspect import signature
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeAlias

import torch
from datasets import Dataset, IterableDataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpox.checkpoint.folders import folder_of
from grpox.checkpoint.rng import random_state, set_random_state
from grpox.config import RunConfig
from grpox.environments import Environment
from grpox.errors import ConfigError, RunClosed, RunFailed, describe
from grpox.observing.notebook import StepTable
from grpox.policy.models import architecture_of, load_model
from grpox.policy.weight_stream import persistent_buffers
from grpox.runfile.load import load_run, resolve_config
from grpox.runfile.overrides import ARGUMENT
from grpox.runtime.launch import rank_or_zero
from grpox.runtime.logs import get_logger
from grpox.runtime.world import World
from grpox.training.arguments import read_arguments, refuse_arguments
from grpox.training.run import OpenRun, open_run

logger = get_logger(__name__)

RewardArgument = Callable[..., Any] | str | Mapping[str, Any]
"""A reward function, a component's name, or a mapping as in a run file."""
EvaluationRows: TypeAlias = Dataset | Sequence[Mapping[str, Any]] | str | Path
"""Held-out prompts: rows, or the path of a file."""
P = ParamSpec("P")
Summary: TypeAlias = dict[str, Any]
Function: TypeAlias = Callable[..., Summary]
EnvironmentArgument = type[Environment] | str | Mapping[str, Any]
"""A class, a component's name, or a mapping as in a run file."""


class Run:
    """A run that is open: its model is loaded, and each `step` is one optimizer step.

    The arguments are those of `train`. Use it as a context manager, or call `close`. One process has one open
    run at a time. Under a launcher each rank makes the same calls in the same order: all methods and `policy`
    are collectives, and return the same on each rank.

    An error within a call ends the run. An error elsewhere in the block of a context manager closes it.

    Raises:
        ConfigError: as `train`; or another run is open in this process.
        RunFailed: the run cannot start.
    """

    def __init__(
        self,
        config: str | Path | Mapping[str, Any] | RunConfig | None = None,
        overrides: Sequence[str] = (),
        *,
        model: PreTrainedModel | str | Path | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        dataset: Dataset | IterableDataset | Sequence[Mapping[str, Any]] | str | Path | None = None,
        eval_dataset: EvaluationRows | Mapping[str, EvaluationRows] | None = None,
        rewards: RewardArgument | Sequence[RewardArgument] | None = None,
        environment: EnvironmentArgument | Sequence[EnvironmentArgument] | None = None,
        tools: Callable[..., Any] | str | Sequence[Callable[..., Any] | str] | None = None,
        callbacks: Sequence[object] = (),
        resume: bool = False,
        **others: Any,
    ) -> None:
        refuse_arguments(others, [*signature(Run).parameters][:-1])
        objects = (model, tokenizer, dataset, eval_dataset, rewards, environment, tools, callbacks)
        given = read_arguments(*objects)
        if isinstance(config, str | Path):
            run = load_run(config, overrides, given=given)
        elif overrides:
            raise TypeError("overrides go with a run file or recipe; change the mapping or RunConfig itself")
        else:
            run = resolve_config({} if config is None else config, Path.cwd(), "python", given=given)
        for warning in run.warnings if rank_or_zero() == 0 else ():
            logger.warning("%s", warning)
        if _current and (other := _current[0]()) is not None:
            what = f"another run is open in this process, in {other.config.output_dir}"
            allowed = "one open run at a time: call close() of the other, or use `with grpox.Run(...) as run`"
            raise ConfigError(what, "output_dir", given=run.config.output_dir, allowed=allowed)
        self._run = run
        self._policy: tuple[int, PreTrainedModel] | None = None
        """The copy of the model, and the number of steps after which it was filled."""
        self._summary: dict[str, Any] | None = None
        stack = ExitStack()
        opened = stack.enter_context(open_run(run, resume))
        self._opened: OpenRun | None = None
        if isinstance(opened, dict):
            stack.close()
            self._summary, self._ended = opened, "it is complete"
            self._table = StepTable(run.config.output_dir, opened["steps"], opened["steps"])
            return
        self._opened, self._ended, total = opened, "", opened.trainer.schedule.total_steps
        self._table = StepTable(run.config.output_dir, total, opened.trainer.policy.engine.steps)
        # It holds no reference to this object, so that an unreferenced run ends.
        opened.trainer.follow = partial(_follow, opened.trainer.world, self._table)
        self._finalizer = weakref.finalize(self, _end, stack, "the program ended, or nothing refers to the run")
        self._stack = stack
        _current[:] = [weakref.ref(self)]
        self._rest(opened)

    @property
    def config(self) -> RunConfig:
        """The resolved config."""
        return self._run.config

    @property
    def history(self) -> list[dict[str, float]]:
        """``step`` and the metrics of each step since the run was opened; as ``metrics.jsonl``, in order."""
        return self._table.history

    @property
    def evaluations(self) -> list[dict[str, float]]:
        """``step`` and the metrics of each evaluation since the run was opened."""
        return self._table.evaluations

    @property
    def done(self) -> bool:
        """True if no step remains; `train` then saves the model."""
        return self._opened is None or self._opened.trainer.ended

    def step(self) -> dict[str, float]:
        """Take one optimizer step, with the evaluation and the checkpoint that are due after it.

        The first step of a run comes after the evaluation before training.

        Returns:
            ``step`` and its metrics, also the last entry of `history`.

        Raises:
            RunFailed: the step failed, which ends the run; or no step remains.
        """
        if self._opened is not None and self._opened.trainer.ended:
            raise RunFailed(f"no step remains after step {self._steps}; train() saves the model")
        with self._running() as opened:
            opened.trainer.start()
            opened.trainer.next_step()
        return self.history[-1]

    def evaluate(self) -> dict[str, float]:
        """Evaluate the current weights on the held-out prompts, once for each step, and record the result.

        It does not count for early stopping.

        Returns:
            ``step`` and the metrics, also the last entry of `evaluations`.

        Raises:
            ConfigError: the run has no held-out prompts.
        """
        if self.config.evaluation is None:
            what, allowed = "the run has no held-out prompts", "eval_dataset=, or evaluation in the config"
            raise ConfigError(what, "evaluation", allowed=allowed)
        if not self.evaluations or self.evaluations[-1]["step"] != self._steps:
            with self._running() as opened:
                opened.trainer.evaluate_between_steps()
        return self.evaluations[-1]

    @property
    def policy(self) -> PreTrainedModel:
        """The model with the current weights: a plain model of transformers, in evaluation mode on this device.

        While the run is open it is a copy, made at the first use and filled anew after a step; changes of it do
        not reach the run. Adapters are merged. Afterwards it is the model that was given, or the saved one. If
        the run was complete when it was opened, it is always the saved one.

        Raises:
            RunFailed: the run ended without a model.
        """
        given = self._run.given.model
        if self._opened is None and given is not None and self._has_given_model:
            return given
        if self._opened is None and self._summary is None:
            raise RunFailed(f"the run in {self.config.output_dir} left no model: {self._ended}")
        if self._policy is not None and self._policy[0] == self._steps:
            return self._policy[1]
        if self._summary is not None:
            saved = self.config.model.model_copy(update={"path": self._summary["model"], "lora": None})
            model = load_model(saved).eval()
        else:
            with self._running() as opened:
                model = _copy_weights(opened, self._policy[1] if self._policy else None)
        self._policy = self._steps, model
        return model

    def save(self) -> Path:
        """Save a checkpoint now, from which ``resume=True`` goes on; return its folder.

        Raises:
            RunFailed: it could not be written.
        """
        with self._running() as opened:
            opened.trainer.checkpoints.save(opened.trainer.state, self._steps, wait=True)
        folder = folder_of(Path(self.config.output_dir), self._steps)
        if not folder.exists():
            raise RunFailed(f"the checkpoint {folder} could not be written")
        return folder

    def train(self) -> dict[str, Any]:
        """Take the steps that remain, save the model, close the run; return what ``summary.json`` holds."""
        if self._summary is not None:
            return self._summary
        with self._running() as opened:
            summary = opened.train()
            self._leave("it is complete")
            self._stack.close()
        self._summary = summary
        self._has_given_model = self._run.given.model is not None
        return summary

    def close(self) -> None:
        """End the run, if it is open, with a checkpoint of its steps, from which ``resume=True`` goes on.

        Afterwards, a model that was given holds the current weights.
        """
        self._close("closed", saves=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or self._opened is None:
            self.close()
        else:  # the other ranks may not come: a checkpoint, which all of them save, could wait for ever
            self._close(f"ended by {describe(error)}", saves=self._opened.trainer.world.size == 1)

    def __repr__(self) -> str:
        return f"<grpox.Run in {self.config.output_dir}, {self._ended or f'after step {self._steps}'}>"

    def _repr_html_(self) -> str:
        return self._table._repr_html_()

    @property
    def _steps(self) -> int:
        """Steps so far, those before a resumed checkpoint included."""
        if self._opened is not None:
            return self._opened.trainer.policy.engine.steps
        return int((self._summary or {}).get("steps", -1))

    @contextmanager
    def _running(self) -> Iterator[OpenRun]:
        """Let the open run work in this block; an error ends it.

        The run's random numbers continue where they were, even if the caller has drawn some meanwhile.
        """
        opened = self._opened
        if opened is None:
            raise RunFailed(f"the run in {self.config.output_dir} has ended: {self._ended}")
        opened.watchdog.resume()
        opened.trainer.state.started += opened.watchdog.paused_for
        set_random_state(self._random)
        try:
            yield opened
        except BaseException as error:
            self._leave(f"it failed: {describe(error)}")
            if not self._stack.__exit__(type(error), error, error.__traceback__):
                raise
        else:
            self._rest(opened)
            if opened.trainer.world.is_main:
                self._table.show()

    def _rest(self, opened: OpenRun) -> None:
        opened.watchdog.pause()
        self._random = random_state()

    def _leave(self, ended: str) -> None:
        """Note that the run is no longer open."""
        self._opened, self._ended = None, ended
        self._finalizer.detach()
        _current.clear()

    def _close(self, reason: str, saves: bool) -> None:
        if self._opened is None:
            return
        step, total = self._steps, self._opened.trainer.schedule.total_steps
        message = f"{reason} after step {step} of {total}"
        try:
            with self._running() as opened:
                if saves and self.history:
                    opened.trainer.checkpoints.save(opened.trainer.state, step, wait=True)
                opened.trainer.checkpoints.finish()
                if saves:
                    opened.release_model()
                if opened.trainer.world.is_main:
                    advice = "; resume=True goes on" if saves and self.history else ""
                    logger.info("%s: %s%s", self.config.output_dir, message, advice)
                raise RunClosed(message)
        except RunClosed:
            self._ended = message
            self._has_given_model = saves and self._run.given.model is not None

    _has_given_model = False
    """True if the model that was given is whole again, with the final weights."""


def _takes_arguments_of(run: Callable[P, Run]) -> Callable[[Function], Callable[P, Summary]]:
    """Give a function the arguments of `Run`, which are listed in one place."""

    def decorate(function: Function) -> Callable[P, Summary]:
        returned = function.__annotations__["return"]
        own = signature(run).replace(return_annotation=returned)
        function.__signature__ = own  # type: ignore[attr-defined]
        return function

    return decorate


@_takes_arguments_of(Run)
def train(*arguments: Any, **named: Any) -> dict[str, Any]:
    """Train as `grpox train` does, from Python. Arguments but the first two stand in for keys of the config.

    Args:
        config: a run file's path, a bundled recipe's name, or the run itself as mapping or `RunConfig`. A
            mapping may leave out what the other arguments give.
        overrides: ``a.b=c``, as on the command line; only with a run file or recipe.
        model: in place of `model.path`. An object is trained itself: after the run it holds the trained
            weights, in evaluation mode, its dropout rates 0. If the run fails it is of no further use.
        tokenizer: the model's; default: the one saved where the model came from.
        dataset: in place of `data`: rows, or the path or hub id of a dataset. An IterableDataset is streamed.
        eval_dataset: in place of `evaluation.path`; a mapping of names to datasets is several sets.
        rewards: in place of the config's: functions, names of components, or mappings as in a run file, where
            ``{"function": f, "weight": 0.5}`` gives a function a weight.
        environment: in place of the config's: a class, a component's name or a mapping as in a run file, or a
            list of them; ``{"class": Lake, "size": 4}`` gives a class its parameters.
        tools: in place of the config's: functions that the model may call, or their references as in a run
            file.
        callbacks: objects with the methods of an observer, beside those of `tracking`.
        resume: go on from the newest good checkpoint in output_dir; without one the run starts over.
        others: refused; the error names the argument or key that stands for a name of TRL.

    Returns:
        what ``summary.json`` holds: accuracy before and after, steps, seconds.

    Raises:
        ConfigError: the config or an argument is wrong, or a run goes on in output_dir; nothing was loaded.
        RunFailed: the run failed.
    """
    try:
        run = Run(*arguments, **named)
    except ConfigError as error:
        of_run = [
            replace(each, where="train()", what=each.what.replace(ARGUMENT, "train()"))
            if each.where == ARGUMENT
            else each
            for each in error.problems
        ]
        raise ConfigError(of_run).with_traceback(error.__traceback__) from error.__cause__
    return run.train()


_current: list[weakref.ref[Run]] = []
"""The open run of this process."""


def _end(stack: ExitStack, reason: str) -> None:
    """End a run that was not closed; nothing is saved, because the other ranks may be gone."""
    logger.warning("a run was not closed: %s", reason)
    stack.__exit__(RunClosed, RunClosed(reason), None)


def _follow(world: World, table: StepTable, kind: str, step: int, metrics: Mapping[str, float]) -> None:
    """Fill the table of every rank."""
    [shared] = world.gather([dict(metrics)] if world.is_main else [])
    table.add(kind, step, shared)
    if world.is_main:
        table.show()


@torch.no_grad()
def _copy_weights(opened: OpenRun, model: PreTrainedModel | None) -> PreTrainedModel:
    """Copy the current weights into `model`, or a new one like the policy; a collective."""
    if model is None:
        model = architecture_of(opened.model)().to(opened.trainer.world.device).eval()
        model.generation_config = opened.generation_config or model.generation_config
    own = dict(model.named_parameters()) | dict(persistent_buffers(model))
    for name, tensor in opened.trainer.policy.engine.weights():
        # Loading keeps some buffers in float32, building a model does not.
        own[name].data = own[name].to(tensor.dtype).copy_(tensor)
    return model
