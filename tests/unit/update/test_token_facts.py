"""Facts about recorded tokens are those of a plain forward by hand, and recording changes nothing."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from support.small_models import gradient_of
from test_masked_positions import FILLS, MODES, episodes
from test_packing import CPU, micro_batches_of, packer_of
from test_packing_budget import Beside
from test_policy_terms import TEMPERATURE, later, small_model, update

from grpox.policy.attention import set_attention
from grpox.policy.batch import Sample, TokenRecord
from grpox.update.policy_update import PolicyUpdate
from grpox.update.token_metrics import TokenFacts

FIELDS = ("logprob", "ratio", "entropy", "correction")


def record_all(micro_batches: list[list[Sample]]) -> list[list[Sample]]:
    """Let every sample be recorded, sample n as that of group n."""
    for number, sample in enumerate(itertools.chain.from_iterable(micro_batches)):
        turns = np.where(sample.token_mask, 0, -1).astype(np.int32)
        sample.token_record = TokenRecord(1, 1, number, 0, turns)
    return micro_batches


def update_of(
    loss: str = "grpo", correction: str = "none", packed: bool = False, **train: Any
) -> tuple[PolicyUpdate, Any]:
    band = {"low": 0.9, "high": 1.5} if correction == "token-mask" else {}
    model = small_model()
    if packed:
        set_attention(model, "grpox_varlen")
    return update(model, loss, correction={"name": correction, **band}, **train), model


def facts_by_number(taken: PolicyUpdate) -> dict[int, TokenFacts]:
    found = {each.record.group: each for each in taken.token_facts}
    assert len(found) == len(taken.token_facts)
    return found


@torch.no_grad()
def by_hand(sample: Sample) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities and entropies f64[T], of the sample alone, by softmax over the whole vocabulary."""
    ids = torch.tensor([sample.prompt + sample.completion])
    first = len(sample.prompt)
    logits = small_model()(input_ids=ids).logits[0, first - 1 : -1] / TEMPERATURE
    p = torch.softmax(logits, dim=-1)
    entropy = -(p * p.log()).sum(dim=-1)
    return p[torch.arange(len(p)), ids[0, first:]].log().numpy(), entropy.numpy()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("is_later", [False, True], ids=["on-policy", "later"])
def test_facts_are_those_of_a_forward_by_hand(mode: str, is_later: bool) -> None:
    micro_batches = record_all(episodes(by_token=True))
    if is_later:
        later(micro_batches)
    wanted = copy.deepcopy(micro_batches)
    taken, _ = update_of(packed=mode == "packed", **MODES[mode])
    taken.step(micro_batches)
    assert taken.packer.mode.packed == (mode == "packed")
    assert bool(taken.packer.mode.shared_width) == (mode in ("shared", "budget"))
    found = facts_by_number(taken)
    assert len(found) == 16
    for number, sample in enumerate(itertools.chain.from_iterable(wanted)):
        facts, mask = found[number], sample.token_mask
        logprobs, entropy = by_hand(sample)
        assert facts.ids.tolist() == list(sample.completion)
        assert facts.is_scored.tolist() == facts.is_counted.tolist() == mask.tolist()
        assert not mask.all()  # every completion has an observation
        np.testing.assert_allclose(facts.logprob[mask], logprobs[mask], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(facts.entropy[mask], entropy[mask], rtol=1e-5, atol=1e-6)
        ratio = np.ones(len(mask))
        if sample.old_logprobs is not None:
            ratio = np.exp(logprobs - sample.old_logprobs.numpy())
            np.testing.assert_allclose(facts.ratio[mask], ratio[mask], rtol=1e-4)
        else:
            assert (facts.ratio[mask] == 1).all()
        assert (facts.correction[mask] == 1).all()
        np.testing.assert_array_equal(facts.sampler_logprob[mask], sample.sampler_logprobs[mask])
        np.testing.assert_array_equal(facts.advantage, sample.advantage)


@pytest.mark.parametrize("correction", ["token-truncate", "token-mask"])
def test_correction_and_counted_tokens_are_those_of_the_loss(correction: str) -> None:
    """The old log-probability is the policy's own, so R is exp(log pi - log mu)."""
    micro_batches = micro_batches_of(3)
    for place, sample in enumerate(itertools.chain.from_iterable(micro_batches)):
        logprobs, _ = by_hand(sample)
        apart = np.linspace(-0.7, 0.7, len(logprobs)) if place % 2 else np.zeros(len(logprobs))
        sample.sampler_logprobs = (logprobs - apart).astype(np.float32)
    wanted = copy.deepcopy(record_all(micro_batches))
    taken, _ = update_of(correction=correction)
    taken.step(micro_batches)
    found, dropped = facts_by_number(taken), 0
    for number, sample in enumerate(itertools.chain.from_iterable(wanted)):
        facts, mask = found[number], sample.token_mask
        raw = np.exp(by_hand(sample)[0] - sample.sampler_logprobs)
        if correction == "token-truncate":
            limit = taken.step_loss.correction.config.cap  # type: ignore[attr-defined]
            np.testing.assert_allclose(facts.correction[mask], np.minimum(raw, limit)[mask], rtol=1e-4)
            assert facts.is_counted.tolist() == mask.tolist()
        else:
            inside = (raw >= 0.9) & (raw <= 1.5)
            assert facts.is_counted.tolist() == (mask & inside).tolist()
            dropped += int((mask & ~inside).sum())
    assert (dropped > 0) == (correction == "token-mask")


def test_the_mask_follows_top_entropy_and_the_off_policy_mask() -> None:
    micro_batches = record_all(later(micro_batches_of(4)))
    kept = {"top_entropy_quantile": 0.3, "off_policy_mask_threshold": 3.8}
    taken, _ = update_of(**kept)
    metrics = taken.step(micro_batches)
    facts = list(facts_by_number(taken).values())
    counted = [each.entropy[each.is_counted] for each in facts]
    threshold = metrics["top_entropy/threshold"]
    assert all((each >= threshold - 1e-3).all() for each in counted)
    high = [each.is_scored & (each.entropy >= threshold + 1e-3) for each in facts]
    left_out = [bool(one.any() and not each.is_counted.any()) for one, each in zip(high, facts, strict=True)]
    apart = [(each.sampler_logprob - each.logprob)[each.is_scored] for each in facts]
    distance = [float(each.sum() / max(len(each), 1)) for each in apart]
    far = [nats > 3.8 and each.advantage[0] < 0 for nats, each in zip(distance, facts, strict=True)]
    assert any(far)
    assert all(one <= other for one, other in zip(left_out, far, strict=True))
    for is_far, one, each in zip(far, high, facts, strict=True):
        assert (each.is_counted[one] != is_far).all()


@pytest.mark.parametrize(
    ("loss", "mode"), [("grpo", "budget"), ("gspo-token", "packed"), ("dapo", "full logits")]
)
def test_recording_changes_no_bit_of_a_step(loss: str, mode: str) -> None:
    results = []
    for records in (False, True):
        micro_batches = episodes()
        if records:
            record_all(micro_batches)
        taken, model = update_of(loss, "token-truncate", mode == "packed", **MODES[mode])
        metrics = taken.step(micro_batches)
        assert len(taken.token_facts) == 16 * records
        old = [s.old_logprobs.numpy().tobytes() for each in micro_batches for s in each]  # type: ignore[union-attr]
        results.append((metrics, gradient_of(model).numpy().tobytes(), old))
    assert results[0] == results[1]


def test_only_the_first_pass_is_recorded() -> None:
    micro_batches = record_all(micro_batches_of(1, count=1))
    taken, _ = update_of()
    taken.step([*micro_batches, *micro_batches])  # two iterations in one step
    assert len(facts_by_number(taken)) == 8
    taken.step(micro_batches)
    assert taken.token_facts == []


def test_completions_without_advantage_go_through_the_model_and_are_recorded() -> None:
    micro_batches = record_all(micro_batches_of(1))
    silent = [
        s for s in itertools.chain.from_iterable(micro_batches) if not (s.token_mask & (s.advantage != 0)).any()
    ]
    assert silent
    numbers = [sample.token_record.group for sample in silent]  # type: ignore[union-attr]
    taken, _ = update_of()
    assert taken.packer.skips_backward
    taken.step(micro_batches)
    found = facts_by_number(taken)
    for number, sample in zip(numbers, silent, strict=True):
        logprobs, _ = by_hand(sample)
        mask = sample.token_mask
        np.testing.assert_allclose(found[number].logprob[mask], logprobs[mask], rtol=1e-5, atol=1e-6)


def test_a_skipped_step_is_recorded_with_what_it_computed() -> None:
    micro_batches = record_all(micro_batches_of(1))
    taken, _ = update_of(on_nonfinite="skip")
    taken.engine.step = lambda loss: torch.tensor(math.inf, dtype=torch.float64)  # type: ignore[method-assign]
    taken.step(micro_batches)
    assert taken.nonfinite.skipped.total == 1
    assert len(taken.token_facts) == 24
    assert all(np.isfinite(each.logprob[each.is_scored]).all() for each in taken.token_facts)


def test_fillers_for_other_ranks_are_not_recorded() -> None:
    world, micro_batches = Beside(0, 2, CPU, told=[(9, 11, 100, 150)]), record_all(micro_batches_of(8))
    packed, _ = packer_of().pack(micro_batches, world)
    recorded = [s for samples, _ in packed for s in samples if s.token_record is not None]
    assert len(recorded) == 24
    assert any(not s.token_mask.any() for samples, _ in packed for s in samples)


@pytest.mark.parametrize("fill", FILLS)
def test_what_lies_at_observations_reaches_no_fact(fill: str) -> None:
    found = []
    for name in ("random", fill):
        micro_batches = record_all(episodes())
        for sample in itertools.chain.from_iterable(micro_batches):
            hidden = ~sample.token_mask
            sample.sampler_logprobs[hidden] = FILLS[name](int(hidden.sum()))
        taken, _ = update_of(correction="sequence-truncate")
        taken.step(micro_batches)
        found.append(facts_by_number(taken))
    for number, facts in found[0].items():
        other = found[1][number]
        for field in FIELDS:
            one, two = getattr(facts, field), getattr(other, field)
            assert one[facts.is_scored].tobytes() == two[facts.is_scored].tobytes()
