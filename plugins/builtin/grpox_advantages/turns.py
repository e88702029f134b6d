"""Rewards and discounted returns of the model's turns, and the advantages that compare them."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from grpox.contracts import AdvantageInputs
from grpox.toolkit import weighted_sum
from grpox_advantages.configs import GigpoConfig, ReturnToGoConfig
from grpox_advantages.scalers import CentredRewards, centre, divisors


class Gigpo:
    """`A_E + omega A_S` for each turn (GiGPO, arXiv 2505.10978, eq. 8).

    A_E compares an episode with its group: `(R - mean_g) / F`, R the sum of all its rewards (eq. 3). A_S
    compares a turn with the turns of the group that began in the same state (eq. 6): `(R_k - mean_s) / F_s`
    (eq. 7), R_k the discounted return from the turn on (eq. 5). F is the standard deviation plus eps, or 1.

    A turn whose state is unknown, or that no other turn of the group began in, has A_S = 0.
    """

    per = "turn"
    signal = "all"

    def __init__(self, config: GigpoConfig) -> None:
        self.config = config

    def scale(self, inputs: AdvantageInputs) -> list[Tensor]:
        """Return N of f32[turns].

        Raises:
            ValueError: completions have several turns, and no turn has a state key.
        """
        rewards = rewards_of_turns(inputs)
        if _has_several_turns(inputs) and not any(turn.state_key for turns in inputs.turns for turn in turns):
            cure = "define state_key() in the environment, or use advantage 'return-to-go' or 'group'"
            raise ValueError(
                f"gigpo compares turns that began in equal states, and no turn has a state_key; {cure}"
            )
        episodes = centre_values([each.sum() for each in rewards], inputs.group_ids)
        returns = torch.cat([discounted(each, self.config.gamma) for each in rewards])  # f64[all turns]
        steps = centre_values(returns, state_groups(inputs))
        of_turns = steps.deviations / divisors_of(steps, self.config)  # f64[all turns]
        of_episodes = episodes.deviations / divisors_of(episodes, self.config)  # f64[N]
        parts = torch.split(of_turns, [len(each) for each in rewards])
        return [(of_episodes[row] + self.config.omega * each).float() for row, each in enumerate(parts)]


class ReturnToGo:
    """`(R_k - mean_g(R_1)) / (std_g(R_1) + eps)` for each turn k, R_k its discounted return.

    Mean and standard deviation are of the returns R_1 of the group's episodes, one each. A baseline for each
    turn number would be a mean over the episodes that go on, and so reward or punish going on. Returns of turns
    are discounted as in Kevin (arXiv 2507.11948).
    """

    per = "turn"
    signal = "all"

    def __init__(self, config: ReturnToGoConfig) -> None:
        self.config = config

    def scale(self, inputs: AdvantageInputs) -> list[Tensor]:
        """Return N of f32[turns], 0 where the episodes of a group have equal returns.

        Raises:
            ValueError: gamma is 1, completions have several turns, and no turn has a reward of its own.
        """
        lists = any(label in inputs.token_rewards for label in inputs.labels)
        has_rewards = lists or any(turn.reward is not None for turns in inputs.turns for turn in turns)
        if self.config.gamma == 1 and _has_several_turns(inputs) and not has_rewards:
            cure = (
                "define turn_rewards() in the environment, let a reward function return a list of rewards, set "
                "gamma below 1, or use advantage 'group', which gives the same"
            )
            raise ValueError(f"return-to-go with gamma 1 needs rewards of turns, and no turn has one; {cure}")
        returns = [discounted(each, self.config.gamma) for each in rewards_of_turns(inputs)]
        centred = centre_values([each[0] for each in returns], inputs.group_ids)
        divisor = divisors_of(centred, self.config)
        scaled = []
        for row, each in enumerate(returns):
            later = each - each[0] + centred.deviations[row]
            scaled.append((later / divisor[row]).float() if centred.signal[row] else torch.zeros(len(each)))
        return scaled


def divisors_of(centred: CentredRewards, config: ReturnToGoConfig) -> Tensor:
    """Return the divisor of each row: the standard deviation of its group plus eps, or 1: f64[M]."""
    if config.norm == "fixed":
        return torch.ones_like(centred.deviations)
    return divisors(centred, config.eps, config.ddof)


def rewards_of_turns(inputs: AdvantageInputs) -> list[Tensor]:
    """Return the rewards of all turns: N of f64[turns], NaN in a completion that no function scored.

    A turn's reward is the environment's, plus the weighted rewards of functions that returned lists, each at
    the turn that its token belongs to or follows. All other functions count at the last turn.
    """
    listed = [label in inputs.token_rewards for label in inputs.labels]
    others = inputs.rewards.clone()
    for k, is_listed in enumerate(listed):
        if is_listed:
            others[:, k] = torch.nan
    at_end = weighted_sum(others, inputs.weights).nan_to_num(nan=0.0)  # f64[N]
    scored = ~inputs.rewards.isnan().all(dim=1)
    rewards = []
    for row, turns in enumerate(inputs.turns):
        of_row = torch.tensor([turn.reward or 0.0 for turn in turns], dtype=torch.float64)
        of_row[-1] += at_end[row]
        for k, is_listed in enumerate(listed):
            if is_listed:
                tokens = inputs.token_rewards[inputs.labels[k]][row].double().nan_to_num(nan=0.0)
                starts = [0, *(turn.start for turn in turns[1:]), len(tokens)]
                parts = [tokens[start:end].sum() for start, end in pairwise(starts)]
                of_row += inputs.weights[k].double() * torch.stack(parts)
        rewards.append(of_row if scored[row] else torch.full_like(of_row, torch.nan))
    return rewards


def discounted(rewards: Tensor, gamma: float) -> Tensor:
    """Return `R_k = sum_{j >= k} gamma^(j - k) r_j`: f64[turns] -> f64[turns]."""
    returns = rewards.clone()
    for k in range(len(rewards) - 2, -1, -1):
        returns[k] += gamma * returns[k + 1]
    return returns


def state_groups(inputs: AdvantageInputs) -> Tensor:
    """Number the states of all turns, one completion after the other: i64[all turns].

    Two turns have the same number if they belong to the same group and began in the same state. A turn without
    a state key has a number of its own.
    """
    numbers: dict[tuple[object, ...], int] = {}
    states = []
    for row, (group, turns) in enumerate(zip(inputs.group_ids.tolist(), inputs.turns, strict=True)):
        for place, turn in enumerate(turns):
            key = (group, turn.state_key) if turn.state_key is not None else (group, row, place)
            states.append(numbers.setdefault(key, len(numbers)))
    return torch.tensor(states)


def centre_values(values: list[Tensor] | Tensor, group_ids: Tensor) -> CentredRewards:
    """Centre one number for each row, f64[M] in groups i64[M], as the rewards of one function of weight 1."""
    column = (torch.stack(values) if isinstance(values, list) else values).unsqueeze(1)
    return centre(column, torch.ones(1), group_ids)


def _has_several_turns(inputs: AdvantageInputs) -> bool:
    """Tell whether a scored completion has several turns."""
    scored = (~inputs.rewards.isnan().all(dim=1)).tolist()
    return any(len(turns) > 1 for turns, is_scored in zip(inputs.turns, scored, strict=True) if is_scored)
