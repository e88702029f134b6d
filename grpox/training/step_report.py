"""The report of a step to the observers: metrics of update, sampling, speed, memory and time."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from grpox.checkpoint.progress import TrainingState
from grpox.config.alarms import OF_UPDATE
from grpox.contracts import RunContext
from grpox.errors import RunFailed, shorten
from grpox.observing.alarms import FILE, PAGE, alarms_in, describe_alarm, write_alarms
from grpox.observing.control import RunControl
from grpox.observing.observers import Observers
from grpox.observing.token_files import TokenTexts, token_file, write_tokens
from grpox.policy.batch import Sample
from grpox.rollout.collector import Collector, GenerationBatch
from grpox.rollout.metrics import mean_metrics, model_lengths
from grpox.rollout.rewards.scoring import weighed_mean_logged, with_logged
from grpox.runtime.files import read_mapping, write_error_message
from grpox.runtime.logs import WarnOnce
from grpox.update.mismatch import mismatch_warnings
from grpox.update.token_metrics import TokenFacts


@dataclass
class StepReport:
    """Calls the observers at each step, and warns of metrics out of their healthy range.

    Args:
        control: for observers that act on the run.
        logprobs_promised: True if the generator declares that it reports every log-probability.
    """

    context: RunContext
    state: TrainingState
    collector: Collector
    observers: Observers
    warn: WarnOnce
    is_main: bool
    control: RunControl | None = None
    logprobs_promised: bool = False

    def rollouts_scored(self, step: int, batches: Sequence[GenerationBatch]) -> None:
        """Report the generation batches that were collected for `step`."""
        for batch in batches if self.is_main else ():
            self.observers.rollouts_scored(self.context, step, batch.rows)

    @cached_property
    def _token_texts(self) -> TokenTexts:
        return TokenTexts(self.collector.prompts.chat.tokenizer)

    def tokens_recorded(self, step: int, completions: Sequence[TokenFacts]) -> None:
        """Write the tokens of the completions of all ranks, on the main rank.

        A failure counts as one of the observer ``record`` and ends no run.
        """
        if not self.is_main or not completions:
            return
        path = token_file(self.context.output_dir, step)
        try:
            write_tokens(path, completions, self._token_texts)
        except Exception as error:  # noqa: BLE001 - as of any observer
            if isinstance(error, OSError):
                error = RunFailed(f"tokens are not saved: {write_error_message(error, path)}")
            self.observers.note_failure("record", "tokens_recorded", error)

    def step_finished(
        self,
        step: int,
        epoch: float,
        new: Sequence[GenerationBatch],
        micro_batches: Sequence[Sequence[Sample]],
        update: Mapping[str, float],
        seconds: float,
    ) -> None:
        """Report a finished step; `update` are the metrics of `PolicyUpdate.step`."""
        phases = self.collector.sampler.times
        times, peak = phases.take(), phases.memory.take()
        for batch in new:
            self.state.num_tokens += sum([len(r.prompt_ids) + len(r.completion_ids) for r in batch.rollouts])
        if not self.is_main:
            return
        tokens = sum([len(sample) for samples in micro_batches for sample in samples])
        own = {
            **{name: value for name, value in update.items() if name not in OF_UPDATE},
            **mean_metrics([self.collector.metrics(batch) for batch in new]),
            **times,
            "step_time": seconds,
            "tokens_per_second/trained": tokens / times["time/update"],
            "memory/peak_gib": peak / 2**30,
        }
        if new:
            rollouts = [row.rollout for batch in new for row in (*batch.rows, *batch.dropped)]
            own["tokens_per_second/generated"] = sum(model_lengths(rollouts)) / times["time/generate"]
        own |= {"num_tokens": self.state.num_tokens, "epoch": epoch}
        if self.state.control.changed:
            own |= self.state.control.metrics()
        own["observers/failures"] = sum(self.observers.failures.values())
        metrics, renamed = with_logged(own, weighed_mean_logged([(batch.logged, 1) for batch in new]))
        for what in renamed:
            self.warn(what, what)
        for key, what in mismatch_warnings(metrics, step, promised=self.logprobs_promised).items():
            self.warn(key, what)
        self.state.metrics = metrics
        self._raise_alarms(step, new, {**own, **update})
        self.observers.step_finished(self.context, step, metrics, self.control)

    def _raise_alarms(self, step: int, new: Sequence[GenerationBatch], metrics: Mapping[str, float]) -> None:
        """Report the alarms that a step raises, except alarms that were reported before a restart.

        Args:
            metrics: metrics of grpox itself, without the own metrics of reward functions.
        """
        alarms = self.state.alarms
        if alarms is None:
            return
        signals = mean_metrics([self.collector.signals(batch) for batch in new])
        raised = alarms.see(step, {**metrics, **signals}, self.collector.ranges(new) if new else None)
        if not raised:
            return
        for alarm in raised:
            if alarm.name == "dead_reward":
                alarm.cause = self._likely_cause(new[0], alarm.subject)
        folder = self.context.output_dir
        before = _by_name(alarms_in(read_mapping(folder / FILE)))
        now = _by_name([alarm.entry() for alarm in alarms.state.raised])
        try:
            write_alarms(folder, list({**before, **now}.values()))
        except OSError as error:  # the summary will have them
            self.warn("alarms", f"alarms are not saved: {write_error_message(error, folder / FILE)}")
        for name, entry in _by_name([alarm.entry() for alarm in raised]).items():
            if name not in before:
                self.warn(f"alarm {name}", f"alarm {describe_alarm(entry)} ({PAGE})")
                self.observers.alarm_raised(self.context, step, entry, self.control)

    def _likely_cause(self, batch: GenerationBatch, label: str) -> str:
        """Explain why a reward may give all completions the same score; empty without a hint."""
        row, causes, rewards = batch.rows[0], [], self.collector.scorer.rewards
        place = [reward.label for reward in rewards].index(label)
        ref, reward = self.context.config.rewards[place], rewards[place]
        if (tag := re.search(r"(<\w+>)\s*\Z", row.prompt)) and not ref.params.get("opened"):
            cure = " (set opened: true)" if ref.name == "format" else ""
            causes.append(f"prompts end with {tag[1]}, so no completion has that opening tag{cure}")
        for column in reward.signature.needs:
            value, completion = row.columns.get(column), row.completion[-60:]
            texts = [shorten(repr(each), 60) for each in (value, completion)]
            causes.append(f"column '{column}', here {texts[0]}, never matches completions, here {texts[1]}")
        return f"likely {' or '.join(causes)}" if causes else ""


def _by_name(alarms: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return name -> alarm; the name of a dead reward has its label, as several may be dead."""
    return {f"{a['name']} {a.get('subject')}" if a["name"] == "dead_reward" else a["name"]: a for a in alarms}
