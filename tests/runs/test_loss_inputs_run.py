"""Whole runs with a loss that needs every input: what it sees is right, and survives a kill."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.killing import assert_same, finish, kill_and_resume, recorded

LOSS = '''
import torch
from grpox.contracts import LossOutput, Reduction

class Needy:
    """-w A + 0.1 KL - 0.001 H, and every input as a diagnostic."""

    reduction = Reduction.TOKEN_MEAN
    scope = "group"
    needs = ("entropy_gradient", "reference_logprobs", "sampler_logprobs", "rewards", "group_ids",
             "sequence_ids", "columns")

    def per_token(self, inputs):
        ids, answers = inputs.group_ids.tolist(), inputs.columns["answer"]
        assert len(answers) == len(ids) == len(inputs.rewards) == len(inputs.sequence_ids)
        assert all(ids.count(each) == 16 for each in ids)
        assert len(set(zip(ids, answers))) == len(set(ids))  # a group is of one row of the dataset
        assert len(set(inputs.sequence_ids.tolist())) == len(ids)
        rho = inputs.reference_logprobs - inputs.logprobs
        loss = -torch.exp(inputs.logprobs - inputs.old_logprobs) * inputs.advantages
        loss = loss + 0.1 * (torch.exp(rho) - rho - 1) - 0.001 * inputs.entropy
        spread = lambda values: values[:, None].expand_as(loss).to(loss.dtype)
        answers = torch.tensor([float(answer) for answer in answers])
        return LossOutput(loss, {
            "mine_reward": spread(inputs.rewards[:, 0]),
            "mine_group": spread(inputs.group_ids),
            "mine_sequence": spread(inputs.sequence_ids),
            "mine_answer": spread(answers),
            "mine_mismatch": (inputs.sampler_logprobs - inputs.old_logprobs).abs(),
        })
'''
SETTINGS = (
    "loss={path: needy.py:Needy}",
    "train.per_device_train_batch_size=32",
    "train.gradient_accumulation_steps=1",
    "train.steps_per_generation=4",
    "train.max_steps=8",
    "evaluation=null",
    "tracking={}",
    "checkpoint.every=1",
)


@pytest.mark.parametrize(
    ("ranks", "further"), [(1, "train.dynamic_sampling_rounds=2"), (2, "train.num_iterations=1")]
)
def test_what_a_loss_needs_survives_a_kill(tmp_path: Path, ranks: int, further: str) -> None:
    (tmp_path / "needy.py").write_text(LOSS)
    whole = tmp_path / "runs" / "whole"
    finish(tmp_path, "quickstart", *SETTINGS, further, "output_dir=runs/whole", ranks=ranks)
    # Three of the four steps on one generation batch.
    assert_same(whole, kill_and_resume(tmp_path, "quickstart", *SETTINGS, further, steps=3, ranks=ranks))
    first, *_, last = [line["metrics"] for line in recorded(whole) if "metrics" in line]
    assert 0 < first["mine_reward"] < 1
    assert last["mine_sequence"] > first["mine_sequence"] > 0
    assert first["mine_mismatch"] < 1e-4
    assert abs(first["kl"]) < 1e-9
    assert last["kl"] > 1e-6
