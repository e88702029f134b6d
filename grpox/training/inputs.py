"""The inputs of a run: model, tokenizer and prompts, from the config or the arguments of `grpox.train`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from grpox.config import EvaluationSetConfig, SamplingConfig
from grpox.config.inputs import AUTO
from grpox.config.sampling import path_key, sampling_of
from grpox.contracts import Capability, PolicyLoss
from grpox.data.chat import PLAIN, ChatTemplate, is_unrendered
from grpox.data.open_data import open_data, reason
from grpox.data.prompts import PromptLimit, PromptSet
from grpox.data.row_stream import RowStream
from grpox.data.schedule import BatchPlan, PromptSampler, Schedule, StreamSampler
from grpox.errors import ConfigError, join
from grpox.policy.float32_head import cast_head
from grpox.policy.lora.add import add_adapters
from grpox.policy.models import (
    check_special_tokens,
    load_config,
    load_model,
    load_tokenizer,
    vocabulary_of,
)
from grpox.policy.rope import fix_rope, longest_sequence, rope_choice
from grpox.policy.routers import check_routers
from grpox.rollout.rewards.isolation import OF_EVALUATION, OF_TRAINING, check_scored_rows
from grpox.runfile.checks import declared_scope, parted_groups, stream_problems
from grpox.runfile.model_options import media_problem
from grpox.runtime.foreign_code import call
from grpox.runtime.launch import rank_or_zero
from grpox.runtime.logs import get_logger
from grpox.runtime.world import World

if TYPE_CHECKING:
    from grpox.runfile.load import ResolvedRun
    from grpox.training.episodes import RunEpisodes

logger = get_logger(__name__)


def model_config(run: ResolvedRun) -> PreTrainedConfig:
    """Return the architecture of the model to train; no weights are loaded."""
    return load_config(run.config.model) if run.given.model is None else run.given.model.config


def decide_longest(run: ResolvedRun) -> int | None:
    """Set the length by which position factors are chosen, and return it; None if the model has no choice."""
    model, config = run.config.model, model_config(run)
    given = model.longest_sequence
    longest = given if isinstance(given, int) else longest_sequence(run.config, config)
    model.longest_sequence = longest = longest if rope_choice(config, longest) else None
    return longest


def open_model(run: ResolvedRun) -> PreTrainedModel:
    """Return the model to train, a Python argument or loaded; with adapters if configured."""
    model = load_model(run.config.model, trains=True) if run.given.model is None else run.given.model
    fix_rope(model, run.config.model.longest_sequence)
    if run.config.model.lora is not None:
        add_adapters(model, run.config.model.lora, run.config.train.seed)
    if run.config.model.cast_lm_head_to_fp32:
        cast_head(model)
    return model


def open_tokenizer(
    run: ResolvedRun, world: World | None = None, functions: Sequence[Any] = (), day: date | None = None
) -> PreTrainedTokenizerBase:
    """Return the tokenizer. A Python argument without a padding token is copied, and the copy pads with EOS.

    With a `world`, also fix `model.chat_date`, by default the `day` of the run that is resumed; a collective.
    """
    model, tokenizer = run.config.model, run.given.tokenizer
    if tokenizer is None:
        tokenizer = load_tokenizer(model)
    if tokenizer.pad_token_id is None:
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.pad_token = tokenizer.eos_token
    templates = [ChatTemplate(tokenizer, model.chat_template_kwargs)]
    templates += [each.chat for each in functions if isinstance(getattr(each, "chat", None), ChatTemplate)]
    if world is not None and model.chat_date == AUTO and any(each.writes_today for each in templates):
        [model.chat_date] = world.gather([day or date.today()] if world.is_main else [])
    for each in templates:
        each.set_day(model.chat_date)
    return tokenizer


def open_prompts(
    run: ResolvedRun,
    tokenizer: PreTrainedTokenizerBase,
    build: Callable[[str], Any] | None = None,
    episodes: RunEpisodes | None = None,
) -> tuple[PromptSet, dict[str, PromptSet]]:
    """Open and check the prompts for training, and the prompts of each set of an evaluation, if there is one.

    Raises:
        ConfigError: data cannot be opened, or a prompt is invalid or too long, see `PromptSet`; the tokenizer
            and the model have different special tokens; or the model is not for text alone.
        RunFailed: the first row of a stream cannot be read.
    """
    config, prompts = run.config, _training_prompts(run, tokenizer, build or run.build, episodes)
    is_unsaid = PLAIN not in run.warnings and "chat" not in config.data.model_fields_set
    if is_unsaid and rank_or_zero() == 0 and is_unrendered(prompts.prompt(0), prompts.chat.source):
        logger.warning("%s", PLAIN)
    return prompts, open_evaluation_prompts(run, tokenizer, episodes)


def _training_prompts(
    run: ResolvedRun,
    tokenizer: PreTrainedTokenizerBase,
    build: Callable[[str], Any],
    episodes: RunEpisodes | None,
) -> PromptSet:
    config, model = run.config, model_config(run)
    if problem := media_problem(model.to_dict(), "model.path", config.model.path):
        raise ConfigError(problem)
    check_routers(model, config.train.router_aux_loss_coef)
    return _prompt_set(run, tokenizer, _training_rows(run, build), config.sampling, episodes)


def open_evaluation_prompts(
    run: ResolvedRun, tokenizer: PreTrainedTokenizerBase, episodes: RunEpisodes | None = None
) -> dict[str, PromptSet]:
    """Open and check the prompts of each set of the evaluation; raises ConfigError as `open_prompts`."""
    evaluation = run.config.evaluation
    if evaluation is None:
        return {}
    prompts, sampling = dict[str, PromptSet](), sampling_of(evaluation, run.config.sampling)
    for name, chosen in evaluation.named_sets.items():
        given = run.given.eval_datasets.get(name)
        rows = _evaluation_rows(chosen, path_key(name)) if given is None else given
        data = f"the evaluation data of {name}" if name else "the evaluation data"
        prompts[name] = _prompt_set(run, tokenizer, rows, sampling, episodes, data, scoring_key(run))
    return prompts


def scoring_key(run: ResolvedRun) -> str:
    """Return the key of the reward functions that score the evaluation: its own, or those of training."""
    own = run.config.evaluation is not None and run.config.evaluation.rewards is not None
    return OF_EVALUATION if own else OF_TRAINING


def check_rows(run: ResolvedRun) -> list[str]:
    """Check the rows of a run and its evaluation as their start does, without a model's weights.

    In a stream, the first `ResolvedRun.most_rows` rows are checked, or else the first generation batch.

    Returns:
        a line for each hub id that is not in the cache, whose rows are not checked.

    Raises:
        ConfigError: see `open_prompts`.
        RunFailed: a row of a stream is not valid.
    """
    from huggingface_hub.constants import HF_HUB_CACHE

    config, evaluation = run.config, run.config.evaluation
    paths = {"model.path": config.model.path, "data.path": config.data.path}
    paths |= {} if evaluation is None else evaluation.set_paths
    missing = {
        key: f"{key}: {path} is not in the hub's cache, so the rows are not checked"
        for key, path in paths.items()
        if path
        and not Path(path).is_absolute()
        and not [*Path(HF_HUB_CACHE).glob(f"*--{path.replace('/', '--')}")]
    }
    if "model.path" in missing:
        return [*missing.values()]
    episodes = None
    if config.has_episodes:
        from grpox.training.episodes import RunEpisodes

        episodes = RunEpisodes(run, None)
    tokenizer = open_tokenizer(run)
    if "data.path" not in missing:
        prompts = _training_prompts(run, tokenizer, run.build, episodes)
        if prompts.stream is not None:
            positions = range(run.most_rows or run.plan.prompts_per_generation)
            prompts.stream.hold(positions)
            prompts.check(positions)
    if evaluation is not None and not missing.keys() & evaluation.set_paths.keys():
        open_evaluation_prompts(run, tokenizer, episodes)
    return [*missing.values()]


def _evaluation_rows(chosen: EvaluationSetConfig, key: str) -> datasets.Dataset:
    """Read the rows of a set; of a stream, only the first ones are read."""
    rows = open_data(chosen.path, chosen.subset, chosen.split, chosen.streaming, key)
    if isinstance(rows, datasets.IterableDataset):
        try:
            first = list(rows.take(chosen.rows or 0))
            opened = datasets.Dataset.from_list(first, features=rows.features)
        except Exception as error:
            raise ConfigError(f"cannot be read: {reason(error)}", key, given=chosen.path) from error
        if not first:
            raise ConfigError("has no row", key, given=chosen.path)
        return opened
    return rows if chosen.rows is None else rows.select(range(min(chosen.rows, len(rows))))


def _prompt_set(
    run: ResolvedRun,
    tokenizer: PreTrainedTokenizerBase,
    rows: datasets.Dataset | RowStream,
    sampling: SamplingConfig,
    episodes: RunEpisodes | None,
    data: str = "the data",
    rewards: str = OF_TRAINING,
) -> PromptSet:
    config, model = run.config, model_config(run)
    check_special_tokens(tokenizer, model, config.model.path)
    of_data, template = config.data, config.model.chat_template_kwargs
    limit = replace(PromptLimit.of_run(of_data, sampling, model), vocabulary=vocabulary_of(model))
    if run.most_rows is not None and isinstance(rows, datasets.Dataset):
        rows = rows.select(range(min(run.most_rows, len(rows))))
    tools_of, column = None if episodes is None else episodes.tools_of, of_data.prompt_column
    own = tools_of, config.has_episodes, config.model.chat_date, of_data
    prompts = PromptSet(rows, column, tokenizer, template, limit, data, *own)
    for key, bound in run.components.items():
        check = getattr(bound.config, "check_prompts", None) if key.startswith(f"{rewards}[") else None
        if check is not None and (problems := check(prompts.chat.examples)):
            raise ConfigError([replace(each, key=join(key, each.key)) for each in problems])
    check_scored_rows(run, rewards, prompts)
    if episodes is not None:
        episodes.check(prompts)
    return prompts


def check_scope(run: ResolvedRun, loss: PolicyLoss | None = None) -> None:
    """Check that the run does not split the groups of a loss of scope "group"; raises ConfigError.

    The checks of a run file do not import every loss, so they miss some scopes.
    """
    bound = run.components["loss"]
    scope = declared_scope(bound, imports=True) if loss is None else getattr(loss, "scope", "token")
    if scope == "group" and (problems := list(parted_groups(run.config, bound))):
        raise ConfigError(problems)


def open_schedule(run: ResolvedRun, prompts: PromptSet, world_size: int) -> Schedule:
    """Plan the steps of the run on `world_size` ranks.

    Raises:
        ConfigError: the batch sizes do not divide, or the data does not fill one generation batch.
        RunFailed: the first generation batch of a stream cannot be read.
    """
    train, plan = run.config.train, BatchPlan.from_config(run.config.train, world_size)
    size = plan.prompts_per_generation
    sampler: PromptSampler | StreamSampler = (
        PromptSampler(len(prompts), size, train.shuffle_dataset, train.seed)
        if prompts.stream is None
        else StreamSampler(prompts.stream, prompts, size)
    )
    return Schedule(plan, sampler, train.max_steps, train.num_train_epochs)


def _training_rows(run: ResolvedRun, build: Callable[[str], Any]) -> datasets.Dataset | RowStream:
    config, data = run.config, run.config.data
    rows: Any
    if run.given.dataset is not None:
        rows = run.given.dataset
    elif data.path is not None:
        rows = open_data(data.path, data.subset, data.split, data.streaming)
    else:
        rows = call("dataset", build("data.source").load)
    if not isinstance(rows, datasets.Dataset | datasets.IterableDataset):
        what = f"{run.components['data.source']} loads no dataset"
        allowed = "a datasets.Dataset or IterableDataset"
        raise ConfigError(what, "data.source", given=type(rows).__name__, allowed=allowed)
    if data.streaming and isinstance(rows, datasets.Dataset):
        rows = rows.to_iterable_dataset()
    if isinstance(rows, datasets.Dataset):
        return rows
    # Only now is it known that a dataset component returns a stream.
    if problems := list(stream_problems(config)):
        raise ConfigError(problems)
    return RowStream(rows, config.train.shuffle_dataset, config.train.seed)


def provides(run: ResolvedRun, capability: Capability) -> bool:
    """Return True if the run's generator provides `capability`."""
    return capability in run.components["generator"].provides
