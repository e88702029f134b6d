"""Loads a run file with overrides and checks the whole run before anything heavy is imported.

First comes the schema: keys, types and bounds of the sections (`grpox.config`) and of components' parameters.
All its problems are reported at once, each with its line. A run that fits it is checked for all else, such as
capabilities, files and batch arithmetic; again all problems are reported at once.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from grpox.config import ComponentRef, PluginsConfig, RunConfig
from grpox.config.run import CORRECTION_OF_OTHERS, REWARD_OF_MODEL, SECTIONS
from grpox.contracts import Capability
from grpox.data.schedule import BatchPlan, PromptSampler
from grpox.errors import ConfigError, Problem, nearest, nearest_whole
from grpox.errors.redaction import remember_secrets
from grpox.errors.validation import problems_of, truths_for_numbers
from grpox.plugins.component import BoundComponent, bind_object
from grpox.plugins.discovery import discover
from grpox.plugins.registry import Registry
from grpox.runfile import checks
from grpox.runfile.checks import CheckContext
from grpox.runfile.component_checks import environment_problems, reward_problems
from grpox.runfile.deepspeed_settings import deepspeed_problems
from grpox.runfile.evaluation import evaluation_problems
from grpox.runfile.lr_schedules import schedule_problems
from grpox.runfile.model_options import (
    checkpointing_problems,
    length_problems,
    lora_problems,
    model_problems,
    plain_prompts,
)
from grpox.runfile.objects import RunObjects
from grpox.runfile.overrides import Origin, apply_overrides
from grpox.runfile.paths import (
    data_problems,
    hub_problems,
    input_path,
    output_problems,
    resolve_object,
    resolve_parameters,
    resolve_paths,
)
from grpox.runfile.recipe_files import recipe_path
from grpox.runfile.secrets import restore_secrets, secret_problems
from grpox.runfile.slots import mentions, selected, tracking_problems
from grpox.runfile.yaml_lines import LONGEST, read_text, read_yaml
from grpox.runtime import launch

CHECKS: tuple[Callable[[CheckContext], Iterable[Problem]], ...] = (
    checks.refused_by_components,
    checks.missing_plugins,
    lambda context: schedule_problems(context.config.train),
    lambda context: checkpointing_problems(context.config.train),
    lambda context: deepspeed_problems(context.config.deepspeed),
    lambda context: hub_problems(context.config.hub),
    evaluation_problems,
    checks.logprobs_problems,
    checks.misplaced_needs,
    checks.train_problems,
    environment_problems,
    output_problems,
    model_problems,
    data_problems,
    reward_problems,
    length_problems,
    lora_problems,
)
"""Checks of a run file that fits its schema, in this order."""
WARNINGS = (checks.level_warnings, plain_prompts)
"""Checks of a run that is right, but may not do what its author expects: context -> one line each."""


@dataclass(frozen=True)
class ResolvedRun:
    """A checked run: all its parts exist and fit together."""

    config: RunConfig
    """Config with absolute input paths."""
    components: Mapping[str, BoundComponent]
    """Dotted key -> component: ``loss``, ``rewards[0]``, ``tracking.mlflow``, ``train.optimizer`` if set."""
    registry: Registry
    source: str
    """The run file or recipe, as the user named it."""
    plan: BatchPlan
    num_prompts: int | None
    """Number of prompts of the training data, if it is cheap to know."""
    given: RunObjects
    """Python objects that replace inputs of the config."""
    warnings: tuple[str, ...] = ()
    """Remarks about combinations that are allowed but unusual, one line each."""
    most_rows: int | None = None
    """Number of rows of each dataset that are read; None: all."""

    def build(self, key: str) -> Any:
        """Build the component under `key`; see `grpox.plugins.registry.Registry.build`."""
        return self.registry.build(self.components[key])

    @property
    def needs_reference(self) -> bool:
        """True where the KL penalty or the loss needs log-probabilities under the reference."""
        return self.config.train.beta > 0 or Capability.REFERENCE_LOGPROBS in self.components["loss"].needs

    @property
    def distributions(self) -> list[str]:
        """Distributions whose components the run uses."""
        return sorted({bound.offer.distribution for bound in self.components.values() if bound.offer})


def load_run(
    run: str | Path,
    overrides: Sequence[str] = (),
    world_size: int | None = None,
    given: RunObjects | None = None,
) -> ResolvedRun:
    """Read, override and check a run file or bundled recipe.

    Args:
        run: path of a YAML file, or the name of a recipe.
        overrides: ``a.b=c``, applied in order.
        world_size: ranks to check the batch arithmetic for; default: the ranks of this launch.
        given: Python objects that replace inputs of the file.

    Raises:
        ConfigError: the run is wrong; lists every problem.
    """
    data, origin = read_run(run, overrides)
    return resolve(data, origin, str(run), given or RunObjects(), world_size)


def read_run(run: str | Path, overrides: Sequence[str]) -> tuple[dict[str, Any], Origin]:
    """Read a run file or recipe and apply `overrides`, unchecked; raises as `load_run`."""
    path = recipe_path(run)
    source = str(run) if path == Path(run) else path.name
    # One character more than allowed, so that a longer file is refused.
    document = read_yaml(read_text(path, source, LONGEST + 1), source)
    if not isinstance(document.data, dict):
        what = "a run file is a mapping of keys such as model, data and rewards"
        raise ConfigError("the run file is empty" if document.data is None else what, where=source)
    overridden = apply_overrides(document.data, overrides)
    return document.data, Origin(source, path.parent.absolute(), document.lines, overridden)


def resolve_config(
    data: Mapping[str, Any] | RunConfig,
    base: Path,
    source: str,
    *,
    given: RunObjects | None = None,
    world_size: int | None = None,
) -> ResolvedRun:
    """Check a run given in Python.

    Args:
        data: the run's sections; not changed.
        base: folder against which relative input paths resolve.
        source: name of the run in problems and in its record.
        given: Python objects that replace inputs, which `data` may then leave out.

    Raises:
        ConfigError: the run is wrong; lists every problem.
    """
    origin = Origin(source, base.absolute())
    return resolve(data, origin, source, given or RunObjects(), world_size)


def resolve(
    data: Mapping[str, Any] | RunConfig,
    origin: Origin,
    source: str,
    given: RunObjects,
    world_size: int | None,
    trains: bool = True,
) -> ResolvedRun:
    """Check a run that was read.

    Args:
        trains: False for a run that reads no training data and writes no folder.

    Raises:
        ConfigError: the run is wrong; lists every problem.
    """
    data = copy.deepcopy(given.merged(data))
    origin = replace(origin, arguments=given.keys)
    if isinstance(data, RunConfig):
        read = data.model_dump(mode="json")
        problems = secret_problems(read)
    else:
        data = read = dict(data)
        problems = restore_secrets(read, origin.folder)
    remember_secrets(read)
    _refuse(problems, origin)
    problems = [*truths_for_numbers(read, RunConfig), *tracking_problems(read)]
    try:
        config = RunConfig.model_validate(data if isinstance(data, RunConfig) else _empty_sections(data))
    except ValidationError as error:
        problems += _schema_problems(error)
    if problems:
        references = list(mentions(read))
        for key, _, reference in references:
            resolve_object(key, reference, origin.base)
        _, of_components = _bind(references, _registry(read), given, origin)
        raise ConfigError(origin.place([*problems, *of_components]))
    resolve_paths(config, origin.base)
    registry = _registry(read)
    _default_correction(config, registry)
    components, problems = _bind(selected(config), registry, given, origin)
    _refuse(problems, origin)
    problems = registry.negotiate(list(components.values()), checks.LOSS_INPUTS)
    problems += resolve_parameters(config, components, origin.base)
    context = CheckContext(config, components, registry.plugins, given, trains)
    problems += [problem for check in CHECKS for problem in check(context)]
    num_prompts = context.num_prompts if given.dataset is None else given.num_prompts
    try:
        plan = BatchPlan.from_config(config.train, world_size or launch.world_size())
        if num_prompts is not None:
            # The sampler itself refuses data that does not fill one generation batch.
            PromptSampler(num_prompts, plan.prompts_per_generation, shuffle=False, seed=0)
    except ConfigError as error:
        problems += error.problems
    _refuse(problems, origin)
    counted = None if config.data.streaming else num_prompts
    warnings = tuple(line for check in WARNINGS for line in check(context))
    return ResolvedRun(config, components, registry, source, plan, counted, given, warnings)


def _registry(data: Mapping[str, Any]) -> Registry:
    """Find the components of the plugins that a run does not disable."""
    try:
        plugins = PluginsConfig.model_validate(data.get("plugins") or {})
    except ValidationError:  # reported with the other mistakes
        plugins = PluginsConfig()
    return Registry(discover(plugins.disable))


def _refuse(problems: Sequence[Problem], origin: Origin) -> None:
    if problems:
        raise ConfigError(origin.place(problems))


def _default_correction(config: RunConfig, registry: Registry) -> None:
    """Set the default correction for a generator whose log-probabilities or weights differ from the trainer's.

    No default is set if the run file names a correction, or with settings that would bias the default.
    """
    if "correction" in config.model_fields_set or config.generator.name is None:
        return
    if config.train.old_logprobs == "generator":
        return  # the ratio already uses the generator's probabilities
    try:
        offer = registry.find("generator", config.generator.name)
    except ConfigError:
        return  # `_bind` reports it
    differs = Capability.OTHER_NUMERICS in offer.spec.provides or config.train.max_staleness > 0
    if differs and not checks.changed_distribution(config.sampling):
        config.correction = ComponentRef(name=CORRECTION_OF_OTHERS)


def _empty_sections(data: Mapping[str, Any]) -> dict[str, Any]:
    """Replace null by an empty section: YAML reads a heading without content as null."""
    filled = dict(data)
    for name, section in SECTIONS.items():
        if name in filled and filled[name] is None and RunConfig.model_fields[name].annotation is section:
            filled[name] = {}
    tracking = filled.get("tracking")
    if isinstance(tracking, dict):
        filled["tracking"] = {name: {} if params is None else params for name, params in tracking.items()}
    return filled


def keys_by_name() -> dict[str, str]:
    """Map the names of the keys of sections to the dotted keys: ``max_steps`` -> ``train.max_steps``."""
    sections = reversed(SECTIONS.items())
    return {name: f"{section}.{name}" for section, model in sections for name in model.model_fields}


def _schema_problems(error: ValidationError) -> Iterator[Problem]:
    """Turn schema errors into problems; for a key in the wrong section, name the right one."""
    sections = keys_by_name()
    for problem in problems_of(error, RunConfig, ""):
        near, name = problem.nearest, problem.key.rpartition(".")[2]
        if problem.what == "unknown key":
            from grpox.runfile.from_trl.fields import key_of  # a table needed only for a mistake

            # ``loss`` for TRL's `loss_type`; ``kl_runaway`` for `alarms.kl`, beside which it would stand;
            # ``train.learning_rate`` for `learning_rate`, and for a part or misspelling of it
            of_part = nearest_whole(name, problem.allowed.split(", "))
            elsewhere = sections.get(name) or near or sections.get(nearest(name, sections), "")
            near = key_of(name) or of_part or elsewhere
        yield replace(problem, nearest=near)


def _bind(
    references: Iterable[tuple[str, str, ComponentRef]], registry: Registry, given: RunObjects, origin: Origin
) -> tuple[dict[str, BoundComponent], list[Problem]]:
    components: dict[str, BoundComponent] = {}
    problems: list[Problem] = []
    for key, kind, reference in references:
        try:
            if key in given.functions:
                function = given.functions[key]
                components[key] = bind_object(kind, function, reference.params, key, reference.label)
            else:
                bound, model = registry.parse(kind, reference, key), given.reward_models.get(key)
                components[key] = bound if model is None else _with_model(bound, model)
        except ConfigError as error:
            first, *others = error.problems
            if kind == "reward" and reference.name and first.given == reference.name:
                folder = input_path(reference.name, origin.base(key))
                if os.path.isfile(Path(folder, "config.json")):  # False too for an impossible path
                    first = replace(first, nearest=f"{{name: {REWARD_OF_MODEL}, model: {reference.name}}}")
            problems += [first, *others]
    return components, problems


def _with_model(bound: BoundComponent, model: Any) -> BoundComponent:
    """Make the reward `bound` score with `model` instead of the model in its parameters."""
    return replace(bound, config=None, load=lambda: bound.load()(bound.config, model=model))
