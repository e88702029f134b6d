"""A generator of two turns as a researcher writes it from the documentation alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from grpox.config import SamplingConfig
from grpox.contracts import GeneratorContext, Prompt, Rollout, Turn
from grpox_generators.configs import HfConfig
from grpox_generators.hf import HfGenerator


class AsksAgain(HfGenerator):
    """Two turns: the model answers, is asked to add 1 to it, and answers again."""

    provides = ("logprobs",)

    def __init__(self) -> None:
        super().__init__(HfConfig())

    def start(self, context: GeneratorContext) -> None:
        super().start(context)
        self._question = tuple(context.tokenizer("+1=", add_special_tokens=False)["input_ids"])

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingConfig, seed: int) -> Iterator[Rollout]:
        room = sampling.max_completion_length - len(self._question)
        if room < 2:  # no room for a second turn
            yield from super().generate(prompts, sampling, seed)
            return
        turn = sampling.model_copy(update={"max_completion_length": room // 2})
        first = list(super().generate(prompts, turn, seed))
        follow = [
            Prompt(place, (*each.prompt_ids, *each.completion_ids, *self._question), 1)
            for place, each in enumerate(first)
        ]
        for second in super().generate(follow, turn, seed + 1):
            yield self._joined(first[second.group_id], second)

    def _joined(self, first: Rollout, second: Rollout) -> Rollout:
        question, version = self._question, first.policy_version
        begin = len(first.completion_ids) + len(question)
        end = begin + len(second.completion_ids)
        return Rollout(
            group_id=first.group_id,
            sample=first.sample,
            prompt_ids=first.prompt_ids,
            completion_ids=(*first.completion_ids, *question, *second.completion_ids),
            finish_reason=second.finish_reason,
            policy_version=version,
            sampler_logprobs=(
                *(first.sampler_logprobs or ()),
                *[0.0] * len(question),
                *(second.sampler_logprobs or ()),
            ),
            model_mask=(*[True] * len(first.completion_ids), *[False] * len(question), *[True] * (end - begin)),
            turns=(
                Turn(0, len(first.completion_ids), first.finish_reason, version, reward=0.0),
                Turn(begin, end, second.finish_reason, version, reward=1.0 * (second.finish_reason == "stop")),
            ),
        )
