"""The trainer of a run, put together: its inputs, engines, observers and loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpox.checkpoint.faults import FaultDumps
from grpox.checkpoint.progress import TrainingState
from grpox.checkpoint.saver import CheckpointSaver
from grpox.checkpoint.shards import ShardFiles
from grpox.contracts import AdvantageScaler, Capability, RunContext
from grpox.data.prompt_cursor import PromptCursor
from grpox.data.prompts import PromptSet
from grpox.data.schedule import Schedule
from grpox.observing.alarms import Alarms
from grpox.observing.display import RunReport, TerminalDisplay
from grpox.observing.early_stop import EarlyStop
from grpox.observing.observers import Observers
from grpox.observing.record import LocalRecord, files_of_observers
from grpox.policy.engine import Engine, FrozenEngine
from grpox.policy.lora.layers import describe_training
from grpox.policy.optimizers import AdamW, NamedSchedule
from grpox.policy.reference import BaseAsReference
from grpox.rollout.collector import Collector, Scorer
from grpox.rollout.rewards import NamedReward
from grpox.rollout.rewards.isolation import OF_EVALUATION, OF_TRAINING, bind_rewards
from grpox.rollout.sampler import CompletionSampler
from grpox.runfile.load import ResolvedRun
from grpox.runfile.lock.model import Lock, LockFile
from grpox.runtime.logs import WarnOnce, get_logger
from grpox.runtime.phases import PhaseTimes
from grpox.runtime.world import World
from grpox.training.components import RunComponents
from grpox.training.evaluation import open_evaluation
from grpox.training.generation_feed import GenerationFeed, TokenChoice
from grpox.training.inputs import (
    EvaluationInputs,
    check_scope,
    open_prompts,
    open_reference,
    open_schedule,
    provides,
)
from grpox.training.steering import Steering
from grpox.training.step_report import StepReport
from grpox.training.trainer import Trainer
from grpox.training.user_code import UserCode
from grpox.update.nonfinite import NonFinitePolicy
from grpox.update.policy_update import PolicyUpdate

if TYPE_CHECKING:
    from grpox.training.episodes import RunEpisodes

logger = get_logger(__name__)


@dataclass(frozen=True)
class TrainInputs:
    """Inputs of a run but for its model, and the functions that score its completions."""

    tokenizer: PreTrainedTokenizerBase
    prompts: PromptSet
    rewards: Sequence[NamedReward]
    evaluation: Sequence[EvaluationInputs]
    """Sets of held-out prompts; empty without an evaluation."""
    schedule: Schedule
    episodes: RunEpisodes | None = None
    """Environments and tools; None if each completion is one turn."""

    @classmethod
    def open(
        cls,
        run: ResolvedRun,
        world: World,
        components: RunComponents,
        code: UserCode,
        tokenizer: PreTrainedTokenizerBase,
    ) -> TrainInputs:
        """Open and check the inputs of a run.

        Args:
            components: the reward functions and the dataset's component are added to them.

        Raises:
            ConfigError: an input cannot be used; see `grpox.training.inputs`.
            RunFailed: the first rows of a stream cannot be read.
        """
        check_scope(run)
        tools_of = None if code.episodes is None else code.episodes.tools_of
        prompts, evaluation_rows = open_prompts(run, tokenizer, components.build, tools_of)
        if code.episodes is not None:
            code.episodes.check(prompts, *evaluation_rows.values())
        rewards = bind_rewards(run.config.rewards, code.rewards, prompts)
        evaluation = EvaluationInputs.bind(run.config, evaluation_rows, code.of_evaluation or code.rewards)
        for key, built in ((OF_TRAINING, code.rewards), (OF_EVALUATION, code.of_evaluation)):
            for place, function in enumerate(built):
                components.add(f"{key}[{place}]", function)
        schedule = open_schedule(run, prompts, world.size)
        return cls(tokenizer, prompts, rewards, evaluation, schedule, code.episodes)


@dataclass(frozen=True)
class TrainerParts:
    """A run that is checked, before its model is loaded."""

    run: ResolvedRun
    world: World
    inputs: TrainInputs
    components: RunComponents
    context: RunContext
    observers: Observers
    lock: Lock
    times: PhaseTimes


def build_observers(run: ResolvedRun, world: World, components: RunComponents, lock: Lock) -> Observers:
    """Build the observers of rank 0: the run's own record and trackers; other ranks have none."""
    selected: list[tuple[str, object]] = []
    if world.is_main:
        # Registered before the record, so called after it, when the folder exists; the trackers come last.
        trackers = [(name, components.build(f"tracking.{name}")) for name in run.config.tracking]
        for place, callback in enumerate(run.given.observers):
            trackers.append(components.add_callback(f"callbacks[{place}]", callback))
        record = LocalRecord(files_of_observers(tracker for _, tracker in trackers))
        selected = [("plugin lock", LockFile(lock)), ("record", record), ("terminal", TerminalDisplay())]
        selected += trackers
        # The latest is called first: trackers may upload the finished report.
        selected.append(("run report", RunReport()))
    return Observers(run.registry.plugins.manager, selected)


def build_engines(
    parts: TrainerParts, model: PreTrainedModel, files: ShardFiles
) -> tuple[Engine, FrozenEngine | BaseAsReference | None]:
    """Shard the policy, and the reference where there is one; a collective."""
    config, world, train = parts.run.config, parts.world, parts.run.config.train
    reference: FrozenEngine | BaseAsReference | None = None
    if parts.run.needs_reference and config.model.lora is None:
        # Before the policy's engine takes the weights that the reference begins with.
        reference = FrozenEngine(open_reference(parts.run, model), config, world)
    build = parts.components.build
    optimizer = build("train.optimizer") if train.optimizer else AdamW(train)
    scheduler = build("train.scheduler") if train.scheduler else NamedSchedule(train)
    steps = parts.inputs.schedule.total_steps
    engine = Engine(model, config, world, steps, optimizer, scheduler, files)
    if engine.chosen_attention and world.is_main:
        logger.info("attention: %s", engine.chosen_attention)
    for name, reason in unused_modes(engine, reference).items():
        if world.is_main:
            logger.warning("%s%s (docs/speed.md)", "" if name == "policy" else f"the {name}: ", reason)
    if config.model.lora is not None:
        if world.is_main:
            logger.info("%s", describe_training(engine.module))
        reference = BaseAsReference(engine) if parts.run.needs_reference else None
    return engine, reference


def unused_modes(engine: Engine, reference: FrozenEngine | BaseAsReference | None) -> dict[str, str]:
    """Return for each engine of a run why it cannot use faster forward passes; empty if it uses all.

    A reference whose reason is the policy's is left out.
    """
    reasons = {"policy": engine.unused_modes}
    if isinstance(reference, FrozenEngine) and reference.unused_modes != engine.unused_modes:
        reasons["reference"] = reference.unused_modes
    return {name: reason for name, reason in reasons.items() if reason}


def build_collector(
    parts: TrainerParts, sampler: CompletionSampler, scaler: AdvantageScaler, warn: WarnOnce
) -> Collector:
    """Build what makes the generation batches of training."""
    train = parts.run.config.train
    return Collector(
        sampler,
        Scorer(parts.inputs.rewards, provides(parts.run, Capability.STREAMING), warn),
        parts.inputs.prompts,
        scaler,
        parts.run.config.sampling,
        train.num_generations,
        prefetches=train.max_staleness > 0,
        rounds=train.dynamic_sampling_rounds or 0,
    )


def build_state(parts: TrainerParts, policy: PolicyUpdate) -> TrainingState:
    """Build the state of the loop before its first step."""
    config = parts.run.config
    early_stop = config.evaluation.early_stop if config.evaluation is not None else None
    is_dynamic = bool(config.train.dynamic_sampling_rounds)
    return TrainingState(
        cursor=PromptCursor(parts.inputs.schedule.sampler) if is_dynamic else None,
        early_stop=None if early_stop is None else EarlyStop(early_stop),
        entropy_control=policy.entropy_control,
        skipped=policy.nonfinite.skipped,
        alarms=None if config.alarms is None else Alarms(config.alarms),
    )


def build_trainer(
    parts: TrainerParts,
    engine: Engine,
    reference: FrozenEngine | BaseAsReference | None,
    sampler: CompletionSampler,
    files: ShardFiles,
) -> Trainer:
    """Put the loop together."""
    run, config, world, inputs = parts.run, parts.run.config, parts.world, parts.inputs
    warn = WarnOnce(logger)
    components = parts.components
    loss, correction, scaler = map(components.build, ("loss", "correction", "advantage"))
    components.complete(parts.observers, config.train.beta)
    check_scope(run, loss)
    needs = run.components["loss"].needs
    collector = build_collector(parts, sampler, scaler, warn)
    dumps = FaultDumps(engine, config, inputs.tokenizer, world)
    nonfinite = NonFinitePolicy(config.train, world, dumps, warn)
    statistics = components.statistics
    policy = PolicyUpdate(engine, reference, loss, correction, config, world, nonfinite, needs, statistics)
    state = build_state(parts, policy)
    tokens, every = config.record.tokens, config.logging.save_completions_every
    choice = TokenChoice(inputs.schedule, tokens, every) if tokens else None
    in_use = any(world.gather([parts.observers.uses_control]))
    steered = {"loss": loss, "correction": correction, "advantage": scaler}
    steering = Steering(world, policy, steered, config, state.control, in_use)
    promised, is_main, control = provides(run, Capability.LOGPROBS), world.is_main, steering.control
    is_built_in = getattr(run.components["generator"].offer, "distribution", "") == "grpox"
    return Trainer(
        context=parts.context,
        world=world,
        schedule=inputs.schedule,
        state=state,
        feed=GenerationFeed(config.train, inputs.schedule, collector, state, world, needs, choice),
        policy=policy,
        evaluator=open_evaluation(run, sampler, inputs.evaluation, warn),
        observers=parts.observers,
        report=StepReport(parts.context, state, collector, parts.observers, warn, is_main, control, promised),
        steering=steering,
        components=components,
        checkpoints=CheckpointSaver(
            config.checkpoint,
            parts.context,
            world,
            parts.lock,
            parts.observers,
            files,
            policy,
            components.states,
            parts.times,
            warn,
        ),
        times=parts.times,
        has_own_numerics=not is_built_in or provides(run, Capability.OTHER_NUMERICS),
    )
