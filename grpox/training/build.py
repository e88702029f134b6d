"""The trainer of a run, put together: its inputs, engines, observers and loop."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from transformers import PreTrainedModel

from grpox.checkpoint.components import RunComponents
from grpox.checkpoint.faults import dump_fault
from grpox.checkpoint.progress import TrainingState
from grpox.checkpoint.saver import CheckpointSaver
from grpox.checkpoint.shards import ShardFiles
from grpox.contracts import Capability, RunContext
from grpox.data.prompts import PromptSet
from grpox.data.schedule import PromptCursor, Schedule
from grpox.observing.alarms import Alarms
from grpox.observing.display import RunReport, TerminalDisplay
from grpox.observing.early_stop import EarlyStop
from grpox.observing.observers import Observers
from grpox.observing.record import LocalRecord, files_of_observers
from grpox.policy.engine import Engine, FrozenEngine
from grpox.policy.lora.layers import describe_training
from grpox.policy.models import load_model
from grpox.policy.optimizers import AdamW, NamedSchedule
from grpox.policy.reference import BaseAsReference
from grpox.rollout.collector import Collector, Scorer
from grpox.rollout.rewards import NamedReward
from grpox.rollout.rewards.isolation import OF_TRAINING, bind_rewards
from grpox.rollout.sampler import CompletionSampler
from grpox.runfile.lock.model import Lock, LockFile
from grpox.runtime.logs import WarnOnce, get_logger
from grpox.training.assembly import Assembly, EvaluationInputs
from grpox.training.evaluation import open_evaluation
from grpox.training.generation_feed import GenerationFeed, TokenChoice
from grpox.training.inputs import (
    check_scope,
    open_prompts,
    open_schedule,
    provides,
)
from grpox.training.steering import Steering
from grpox.training.step_report import StepReport
from grpox.training.trainer import Trainer
from grpox.update.nonfinite import NonFinitePolicy
from grpox.update.policy_update import PolicyUpdate

logger = get_logger(__name__)


@dataclass(frozen=True)
class TrainInputs:
    """A checked run before its model is loaded, with the plan of its steps."""

    assembly: Assembly
    components: RunComponents
    lock: Lock
    prompts: PromptSet
    rewards: Sequence[NamedReward]
    evaluation: Sequence[EvaluationInputs]
    """Sets of held-out prompts; empty without an evaluation."""
    schedule: Schedule


def open_inputs(assembly: Assembly, components: RunComponents, lock: Lock) -> TrainInputs:
    """Open and check the inputs of a run, and add the components among them to `components`.

    Raises:
        ConfigError: an input cannot be used; see `grpox.training.inputs`.
        RunFailed: the first rows of a stream cannot be read.
    """
    run = assembly.run
    check_scope(run)
    prompts, eval_sets = open_prompts(run, assembly.tokenizer, components.build, assembly.episodes)
    rewards = bind_rewards(run.config.rewards, assembly.rewards[OF_TRAINING], prompts)
    evaluation = assembly.bind(eval_sets)
    for key, functions in assembly.rewards.items():
        for place, function in enumerate(functions):
            components.add(f"{key}[{place}]", function)
    schedule = open_schedule(run, prompts, assembly.world.size)
    return TrainInputs(assembly, components, lock, prompts, rewards, evaluation, schedule)


def build_observers(inputs: TrainInputs) -> Observers:
    """Build the observers of rank 0: the run's own record and trackers; other ranks have none."""
    run, components = inputs.assembly.run, inputs.components
    selected: list[tuple[str, object]] = []
    if inputs.assembly.world.is_main:
        # Registered before the record, so called after it, when the folder exists; the trackers come last.
        trackers = [(name, components.build(f"tracking.{name}")) for name in run.config.tracking]
        for place, callback in enumerate(run.given.observers):
            trackers.append(components.add_callback(f"callbacks[{place}]", callback))
        record = LocalRecord(files_of_observers(tracker for _, tracker in trackers))
        selected = [("plugin lock", LockFile(inputs.lock)), ("record", record), ("terminal", TerminalDisplay())]
        selected += trackers
        # The latest is called first: trackers may upload the finished report.
        selected.append(("run report", RunReport()))
    return Observers(run.registry.plugins.manager, selected)


def build_engines(
    inputs: TrainInputs, model: PreTrainedModel, files: ShardFiles
) -> tuple[Engine, FrozenEngine | BaseAsReference | None]:
    """Shard the policy, and the reference where there is one; a collective."""
    run, world, build = inputs.assembly.run, inputs.assembly.world, inputs.components.build
    config, train = run.config, run.config.train
    reference: FrozenEngine | BaseAsReference | None = None
    if run.needs_reference and config.model.lora is None:
        # Before the policy's engine takes over the weights with which the reference begins.
        same = load_model(config.model) if run.given.model is None else copy.deepcopy(model)
        reference = FrozenEngine(same, config, world)
    optimizer = build("train.optimizer") if train.optimizer else AdamW(train)
    scheduler = build("train.scheduler") if train.scheduler else NamedSchedule(train)
    engine = Engine(model, config, world, inputs.schedule.total_steps, optimizer, scheduler, files)
    if engine.chosen_attention and world.is_main:
        logger.info("attention: %s", engine.chosen_attention)
    for name, reason in unused_modes(engine, reference).items():
        if world.is_main:
            logger.warning("%s%s (docs/speed.md)", "" if name == "policy" else f"the {name}: ", reason)
    if config.model.lora is not None:
        if world.is_main:
            logger.info("%s", describe_training(engine.module))
        reference = BaseAsReference(engine) if run.needs_reference else None
    return engine, reference


def unused_modes(engine: Engine, reference: FrozenEngine | BaseAsReference | None) -> dict[str, str]:
    """Return the reasons why engines of a run cannot use faster forward passes, each reason once."""
    reasons = {"policy": engine.unused_modes}
    if isinstance(reference, FrozenEngine) and reference.unused_modes != engine.unused_modes:
        reasons["reference"] = reference.unused_modes
    return {name: reason for name, reason in reasons.items() if reason}


def build_trainer(
    inputs: TrainInputs,
    context: RunContext,
    observers: Observers,
    engine: Engine,
    reference: FrozenEngine | BaseAsReference | None,
    sampler: CompletionSampler,
    files: ShardFiles,
) -> Trainer:
    """Put the loop together."""
    run, world, times = inputs.assembly.run, inputs.assembly.world, inputs.assembly.times
    config, train, components, warn = run.config, run.config.train, inputs.components, WarnOnce(logger)
    loss, correction, scaler = map(components.build, ("loss", "correction", "advantage"))
    components.complete(observers, train.beta)
    check_scope(run, loss)
    needs, statistics = run.components["loss"].needs, components.statistics
    collector = Collector(
        sampler,
        Scorer(inputs.rewards, provides(run, Capability.STREAMING), warn),
        inputs.prompts,
        scaler,
        config.sampling,
        train.num_generations,
        prefetches=train.max_staleness > 0,
        rounds=train.dynamic_sampling_rounds or 0,
    )
    dump = partial(dump_fault, engine, config, inputs.assembly.tokenizer, world)
    nonfinite = NonFinitePolicy(train, world, dump, warn)
    policy = PolicyUpdate(engine, reference, loss, correction, config, world, nonfinite, needs, statistics)
    early_stop = config.evaluation.early_stop if config.evaluation is not None else None
    state = TrainingState(
        cursor=PromptCursor(inputs.schedule.sampler) if train.dynamic_sampling_rounds else None,
        early_stop=None if early_stop is None else EarlyStop(early_stop),
        entropy_control=policy.entropy_control,
        skipped=nonfinite.skipped,
        alarms=None if config.alarms is None else Alarms(config.alarms),
    )
    tokens, every = config.record.tokens, config.logging.save_completions_every
    choice = TokenChoice(inputs.schedule, tokens, every) if tokens else None
    in_use = any(world.gather([observers.uses_control]))
    steered = {"loss": loss, "correction": correction, "advantage": scaler}
    steering = Steering(world, policy, steered, config, state.control, in_use)
    promised, is_main, control = provides(run, Capability.LOGPROBS), world.is_main, steering.control
    is_built_in = getattr(run.components["generator"].offer, "distribution", "") == "grpox"
    return Trainer(
        context=context,
        world=world,
        schedule=inputs.schedule,
        state=state,
        feed=GenerationFeed(train, inputs.schedule, collector, state, world, needs, choice),
        policy=policy,
        evaluator=open_evaluation(run, sampler, inputs.evaluation, warn),
        observers=observers,
        report=StepReport(context, state, collector, observers, warn, is_main, control, promised),
        steering=steering,
        components=components,
        checkpoints=CheckpointSaver(
            config.checkpoint, context, world, inputs.lock, observers, files, policy, components, times, warn
        ),
        times=times,
        has_own_numerics=not is_built_in or provides(run, Capability.OTHER_NUMERICS),
    )
