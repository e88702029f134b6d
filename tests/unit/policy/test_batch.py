"""Padding of a micro-batch: which token lands where."""

import torch

from grpox.contracts import Rollout
from grpox.policy.batch import collate, samples_of

CPU = torch.device("cpu")


def test_prompts_are_padded_left_and_completions_right():
    rollouts = [
        Rollout(0, 0, (5,), (6, 7, 8), "length", 0, sampler_logprobs=(-1.0, -2.0, -3.0)),
        Rollout(0, 1, (5, 4), (9,), "stop", 0),
    ]
    batch = collate(samples_of(rollouts, [0.5, -0.5]), CPU)
    assert batch.input_ids.tolist() == [[0, 5, 6, 7, 8], [5, 4, 9, 0, 0]]
    assert batch.attention_mask.tolist() == [[0, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    assert batch.token_mask.tolist() == [[True, True, True], [True, False, False]]
    assert batch.position_ids.tolist() == [[0, 0, 1, 2, 3], [0, 1, 2, 2, 2]]
    assert batch.completion_ids.tolist() == [[6, 7, 8], [9, 0, 0]]
    assert batch.sampler_logprobs[0].tolist() == [-1, -2, -3]
    assert batch.sampler_logprobs[1].isnan().all()
    assert batch.advantages.tolist() == [0.5, -0.5]


def test_a_pad_token_inside_a_completion_is_still_a_token():
    """If EOS serves as padding, only lengths can distinguish the two, not ids."""
    batch = collate(samples_of([Rollout(0, 0, (5,), (6, 0), "stop", 0)], [1.0]), CPU)
    assert batch.token_mask.tolist() == [[True, True]]
    assert batch.attention_mask.tolist() == [[1, 1, 1]]


def test_tokens_that_the_model_did_not_write_are_attended_but_not_trained():
    rollout = Rollout(0, 0, (5,), (6, 7, 8), "stop", 0, model_mask=(True, False, True))
    batch = collate(samples_of([rollout], [1.0]), CPU)
    assert batch.token_mask.tolist() == [[True, False, True]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1]]
