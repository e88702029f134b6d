"""What the section `evaluation`, and keys that name its metrics, ask of the rest of the run file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from grpox.config import EvaluationConfig, RunConfig
from grpox.config.run import labels_of_evaluation
from grpox.config.sampling import PREFIX, bare_name, sampling_of
from grpox.errors import Problem, nearest
from grpox.runfile.check_context import CheckContext
from grpox.runfile.metric_names import candidates, of_evaluations, of_steps


def evaluation_problems(context: CheckContext) -> Iterator[Problem]:
    """Find settings of the evaluation that cannot be, and named metrics that will not be there."""
    yield from _best(context)
    if (evaluation := context.config.evaluation) is not None:
        yield from _accuracy(context.config, evaluation)
        yield from _pass_at_k(evaluation)
        yield from _sampling(context, evaluation)
        yield from _early_stop(context, evaluation)


def _accuracy(config: RunConfig, evaluation: EvaluationConfig) -> Iterator[Problem]:
    labels = labels_of_evaluation(config)
    if evaluation.accuracy is not None and evaluation.accuracy not in labels:
        what = f"no such reward of {'this run' if evaluation.rewards is None else 'the evaluation'}"
        name, near = evaluation.accuracy, nearest(evaluation.accuracy, labels)
        yield Problem(what, "evaluation.accuracy", given=name, allowed=", ".join(labels), nearest=near)


def _pass_at_k(evaluation: EvaluationConfig) -> Iterator[Problem]:
    most, key = evaluation.num_generations, "evaluation.pass_at_k"
    for place, k in enumerate(evaluation.pass_at_k):
        if not 1 <= k <= most:
            what = "is not a number of the completions that a prompt has"
            allowed = f"1 to {most} (evaluation.num_generations)"
            yield Problem(what, f"{key}[{place}]", given=str(k), allowed=allowed)
        elif k in evaluation.pass_at_k[:place]:
            yield Problem("is listed twice", f"{key}[{place}]", given=str(k))


def _sampling(context: CheckContext, evaluation: EvaluationConfig) -> Iterator[Problem]:
    sampling, key = sampling_of(evaluation, context.config.sampling), "evaluation.sampling"
    if evaluation.num_generations > 1 and sampling.temperature == 0:
        what = "decodes greedily: all completions of a prompt would be the same one"
        given = f"0 with evaluation.num_generations {evaluation.num_generations}"
        yield Problem(what, "evaluation.temperature", given=given, allowed="more than 0, or num_generations 1")
    if sampling.min_completion_length > sampling.max_completion_length:
        what = f"is more than max_completion_length {sampling.max_completion_length}"
        yield Problem(what, f"{key}.min_completion_length", given=str(sampling.min_completion_length))
    if "" in (evaluation.sampling.stop or []):
        yield Problem("a text is empty: every completion would end at once", f"{key}.stop")
    check = getattr(context.generator and context.generator.config, "check_sampling", None)
    for problem in () if check is None else check(sampling):
        name = problem.key.removeprefix("sampling.").partition(".")[0].partition("[")[0]
        if getattr(evaluation.sampling, name, None) is not None:  # else it is told of the run's own
            yield replace(problem, key=f"evaluation.{problem.key}")


def _early_stop(context: CheckContext, evaluation: EvaluationConfig) -> Iterator[Problem]:
    chosen = evaluation.early_stop
    if chosen is None:
        return
    if evaluation.every == 0:
        what = "there is no evaluation between the first step and the last, after which the run could end"
        yield Problem(what, "evaluation.early_stop", given="evaluation.every 0", allowed="evaluation.every > 0")
    names, key = of_evaluations(context.config, context.components), "evaluation.early_stop.metric"
    if not names.has(bare_name(chosen.metric)):
        near = nearest(bare_name(chosen.metric.removeprefix("eval_")), names.known)
        what, allowed = "no such metric of the evaluation", ", ".join(names.known)
        yield Problem(what, key, given=chosen.metric, allowed=allowed, nearest=near)


def _best(context: CheckContext) -> Iterator[Problem]:
    config, components = context.config, context.components
    name, key = config.checkpoint.best, "checkpoint.best"
    if name is None:
        return
    steps = of_steps(config, components)
    evaluations = None if config.evaluation is None else of_evaluations(config, components)
    if name.startswith(PREFIX) and evaluations is None:
        what = "nothing is evaluated in this run"
        yield Problem(
            what, key, given=name, allowed="a metric of steps, such as reward, or a section evaluation"
        )
        return
    known, near = candidates(name, steps, evaluations)
    of_evaluation = evaluations is not None and name.startswith(PREFIX) and evaluations.has(bare_name(name))
    of_step = not name.startswith(PREFIX) and steps.has(name) and not near.startswith(PREFIX)
    if not (of_evaluation or name in steps.known or of_step):
        what = "no metric that this run logs"
        yield Problem(what, key, given=name, allowed=", ".join(known), nearest=near)
