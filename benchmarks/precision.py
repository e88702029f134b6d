"""Differences between a model in bfloat16 and in float32: log-probabilities and gradient on the same rollouts.

    python benchmarks/precision.py [--run smollm2] [--model-path FOLDER] [--prompts 4] [--samples 4]
                                   [--length 48] [--device cpu] [--out FILE.json]

The float32 model samples completions. Both models compute their log-probabilities, and the gradient of a loss
with advantages of 1 and -1 in turns, in the forward mode of a run. The last line is a JSON object.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import Any

import torch
from outcome import add_out, tell
from surroundings import surroundings
from torch import Tensor
from transformers import PreTrainedModel

from grpox.config import ModelConfig
from grpox.contracts import Rollout
from grpox.policy.batch import Sample, collate, samples_of
from grpox.policy.engine import disable_dropout
from grpox.policy.logprobs import completion_logprobs
from grpox.policy.models import load_model
from grpox.policy.scoring_forward import install_scoring_forward
from grpox.runfile.load import ResolvedRun, load_run
from grpox.training.inputs import open_prompts, open_tokenizer


@torch.no_grad()
def recorded(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], samples: int, length: int
) -> list[Rollout]:
    """Sample `samples` completions of each prompt, all of `length` tokens."""
    rollouts = []
    for group, prompt in enumerate(prompts):
        ids = torch.tensor([list(prompt)] * samples, device=model.device)
        options = {"max_new_tokens": length, "min_new_tokens": length, "do_sample": True, "top_k": 0}
        sampled = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        completions = sampled[:, ids.shape[1] :].tolist()
        rollouts += [
            Rollout(group, sample, tuple(prompt), tuple(completion), "length", 0)
            for sample, completion in enumerate(completions)
        ]
    return rollouts


def scored(model: PreTrainedModel, samples: Sequence[Sample], run: ResolvedRun) -> tuple[Tensor, Tensor]:
    """Compute the log-probabilities of the tokens, and the gradient of all weights, as one vector each."""
    mode = install_scoring_forward(model, run.config.train)
    batch = collate(samples, model.device, mode)
    logprobs, _ = completion_logprobs(model, batch, run.config.sampling.temperature)
    mask = batch.token_mask
    (-(logprobs * batch.advantages.unsqueeze(1))[mask].mean()).backward()
    gradient = torch.cat([p.grad.flatten().float() for p in model.parameters() if p.grad is not None])
    return logprobs.detach()[mask].float(), gradient


def _dot(one: Tensor, other: Tensor) -> float:
    """Multiply two vectors in float64: a float32 sum over all weights of a model is off by some percent."""
    parts = zip(one.split(2**22), other.split(2**22), strict=True)
    return sum(float(torch.dot(left.double(), right.double())) for left, right in parts)


def compare(
    run: ResolvedRun, prompts: int, samples: int, length: int, device: torch.device
) -> dict[str, float]:
    """Compare the two precisions.

    Returns:
        mean and largest difference of the log-probabilities in nats, cosine of the gradients, and the length of
        the bfloat16 gradient as a part of the other's.
    """
    torch.manual_seed(run.config.train.seed)
    chosen, _ = open_prompts(run, open_tokenizer(run))
    token_ids = [chosen.token_ids(number) for number in range(prompts)]
    results, rollouts = [], None
    for dtype in ("float32", "bfloat16"):
        section = run.config.model.model_dump() | {"dtype": dtype}
        model = load_model(ModelConfig.model_validate(section)).to(device)
        disable_dropout(model)
        rollouts = rollouts or recorded(model, token_ids, samples, length)
        advantages = [1.0 - 2 * (place % 2) for place in range(len(rollouts))]
        results.append(scored(model, samples_of(rollouts, advantages), run))
        del model
    (logprobs, gradient), (rounded, rounded_gradient) = results
    difference, lengths = (rounded - logprobs).abs(), [math.sqrt(_dot(each, each)) for _, each in results]
    return {
        "tokens": float(len(logprobs)),
        "logprob_difference_mean": float(difference.mean()),
        "logprob_difference_max": float(difference.max()),
        "gradient_cosine": _dot(gradient, rounded_gradient) / math.prod(lengths),
        "gradient_length": lengths[1] / lengths[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--run", default="smollm2", help="run file or recipe, for model and prompts")
    parser.add_argument("--model-path", help="another model in place of the run's")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--samples", type=int, default=4, help="completions of a prompt")
    parser.add_argument("--length", type=int, default=48, help="tokens of a completion")
    parser.add_argument("--device", default="cpu")
    add_out(parser)
    given = parser.parse_args()
    overrides = [f"model.path={given.model_path}"] if given.model_path else []
    run = load_run(given.run, overrides)
    result: dict[str, Any] = {"run": given.run, "device": given.device}
    result |= compare(run, given.prompts, given.samples, given.length, torch.device(given.device))
    for name, value in result.items():
        print(f"{name:26}{value}")
    tell(result | surroundings(("grpox", "torch", "transformers")), given.out)


if __name__ == "__main__":
    main()
