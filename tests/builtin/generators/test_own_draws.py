"""Draws of prompts with seeds of their own: the same, whatever else is sampled with them."""

from __future__ import annotations

import numpy as np
import torch

from grpox.contracts import Prompt
from grpox_generators.sampling import AT_A_TIME, Draw, own_uniform
from grpox_generators.vllm_sampling import seed_of

CPU = torch.device("cpu")
LENGTH = AT_A_TIME + 3


def numbers(*prompts: Prompt) -> torch.Tensor:
    """f64[N, LENGTH]."""
    uniform = own_uniform(prompts, CPU)
    assert uniform is not None
    return torch.cat([uniform() for _ in range(LENGTH)], dim=1)


def prompt(seed: int | None, samples: int = 2, group: int = 0) -> Prompt:
    return Prompt(group, (1,), samples, seed)


def test_a_prompt_has_its_numbers_in_any_company() -> None:
    torch.manual_seed(1)
    together = numbers(prompt(7), prompt(8, 3, 1), prompt(9, 2, 2))
    torch.manual_seed(2)
    alone = numbers(prompt(8, 3, 5))
    assert torch.equal(together[2:5], alone)
    assert len(alone.unique()) == alone.numel()  # neither samples nor tokens share one
    assert not torch.equal(numbers(prompt(7)), numbers(prompt(8)))
    assert 0 <= alone.min() < alone.max() < 1


def test_the_global_numbers_are_left_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    numbers(prompt(7))
    assert torch.equal(torch.rand(4), expected)


def test_without_a_seed_of_each_prompt_the_call_decides() -> None:
    assert own_uniform([], CPU) is None
    assert own_uniform([prompt(None)], CPU) is None
    assert own_uniform([prompt(7), prompt(None)], CPU) is None


def test_a_row_draws_by_its_own_numbers_after_others_have_left() -> None:
    scores = torch.zeros(4, 1000)

    def tokens(*prompts: Prompt, left: int = 0) -> list[int]:
        rows = sum(each.num_samples for each in prompts)
        draw = Draw(rows, 2, False, CPU, own_uniform(prompts, CPU))
        nothing = torch.zeros(rows, 1, dtype=torch.long)
        draw(nothing, scores[:rows].clone())
        draw.keep(torch.arange(rows) >= left)
        found: list[int] = draw(nothing[left:], scores[left:rows].clone()).argmax(dim=-1).tolist()
        return found

    assert tokens(prompt(7), prompt(8), left=2) == tokens(prompt(8))


def test_vllm_takes_the_prompts_own_seed() -> None:
    assert seed_of(prompt(7, group=3), 11) == 7
    assert seed_of(prompt(None, group=3), 11) == np.random.SeedSequence([11, 3]).generate_state(1)[0]
