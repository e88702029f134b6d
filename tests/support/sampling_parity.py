"""Log-probabilities that a generator must tell: the policy's, under any setting as transformers' processors."""

from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedModel

from grpox.config import SamplingConfig
from grpox.contracts import GeneratorContext, Rollout
from grpox.policy.batch import collate, samples_of
from grpox.policy.logprobs import completion_logprobs
from grpox.policy.models import architecture_of
from grpox_generators.sampling import processors_of

SETTINGS = [
    {"temperature": 0.7},
    {"top_p": 0.8},
    {"top_k": 3},
    {"min_p": 0.2},
    {"repetition_penalty": 1.5},
    {"min_completion_length": 4},
    {"temperature": 1.6, "top_p": 0.9, "repetition_penalty": 1.2},
]

MODEL = Path(str(resources.files("grpox.runfile.recipes"))) / "quickstart" / "model"


def context_of(policy: PreTrainedModel, folder: Path = MODEL) -> GeneratorContext:
    """Return what a policy's generator starts with, on one rank and a CPU, with the tokenizer of a folder."""
    tokenizer, ends = AutoTokenizer.from_pretrained(folder), (policy.config.eos_token_id,)
    cpu = torch.device("cpu")
    return GeneratorContext(folder, architecture_of(policy), tokenizer, ends, cpu, 0, 1, 0, policy)


@torch.no_grad()
def difference(policy: PreTrainedModel, rollouts: Sequence[Rollout], temperature: float) -> float:
    """Return the largest abs(log pi - log mu) of a token that was sampled at this temperature alone."""
    batch = collate(samples_of(rollouts, [0.0] * len(rollouts)), torch.device("cpu"))
    assert batch.sampler_logprobs is not None
    logprobs, _ = completion_logprobs(policy, batch, temperature)
    return float((logprobs - batch.sampler_logprobs)[batch.token_mask].abs().max())


@torch.no_grad()
def largest_difference(
    policy: PreTrainedModel, rollouts: Sequence[Rollout], sampling: SamplingConfig, ends: Sequence[int]
) -> float:
    """Return it likewise, with log pi as transformers' processors make it of the policy's logits."""
    largest = 0.0
    for rollout in rollouts:
        prompt = torch.tensor([rollout.prompt_ids])
        whole = torch.tensor([[*rollout.prompt_ids, *rollout.completion_ids]])
        logits = policy(whole).logits.float()
        process = processors_of(policy, sampling, ends, sampling.max_completion_length, prompt)
        told = rollout.sampler_logprobs or ()
        for place, (token, logprob) in enumerate(zip(rollout.completion_ids, told, strict=True)):
            end = prompt.shape[1] + place
            scores = process(whole[:, :end], logits[:, end - 1].clone())
            expected = torch.log_softmax(scores, dim=-1)[0, token]
            largest = max(largest, float((expected - logprob).abs()))
    return largest
