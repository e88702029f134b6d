"""Rollouts against what was asked for: nothing that is missing, doubled or outdated is trained on."""

from __future__ import annotations

from collections.abc import Sequence

from grpox.contracts import Prompt, Rollout
from grpox.errors import RunFailed


def check_rollouts(rollouts: Sequence[Rollout], requests: Sequence[Prompt], versions: range) -> None:
    """Refuse rollouts that are not the ones asked for.

    Args:
        rollouts: all of them, in order of group and sample.
        requests: in order of group.
        versions: optimizer steps of the weights that may have sampled them; the last are the policy's.

    Raises:
        RunFailed: a sample is missing or doubled, or was sampled by other weights.
    """
    expected = [(prompt.group_id, sample) for prompt in requests for sample in range(prompt.num_samples)]
    if [(rollout.group_id, rollout.sample) for rollout in rollouts] != expected:
        raise RunFailed(
            f"the generator returned {len(rollouts)} rollouts that are not the {len(expected)} asked for"
        )
    for rollout in rollouts:
        _check_version(rollout, versions)


class ArrivingGroups:
    """The groups asked for, as their rollouts arrive one by one in any order.

    Args:
        versions: as of `check_rollouts`.
    """

    def __init__(self, requests: Sequence[Prompt], versions: range) -> None:
        self._versions = versions
        self._missing = {prompt.group_id: set(range(prompt.num_samples)) for prompt in requests}
        self._arrived: dict[int, list[Rollout]] = {prompt.group_id: [] for prompt in requests}

    def add(self, rollout: Rollout) -> list[Rollout] | None:
        """The whole group in order of samples if this was its last rollout, else None.

        Raises:
            RunFailed: nobody asked for this sample, it has arrived before, or other weights sampled it.
        """
        group, sample = rollout.group_id, rollout.sample
        missing = self._missing.get(group, set())
        if sample not in missing:
            twice = any(sample == earlier.sample for earlier in self._arrived.get(group, ()))
            what = "twice" if twice else "that was not asked for"
            raise RunFailed(f"the generator returned a rollout {what}: sample {sample} of group {group}")
        _check_version(rollout, self._versions)
        missing.remove(sample)
        self._arrived[group].append(rollout)
        return None if missing else sorted(self._arrived[group], key=lambda arrived: arrived.sample)


def _check_version(rollout: Rollout, versions: range) -> None:
    if rollout.policy_version not in versions:
        begun = f" and sampling was begun at version {versions[0]}" if len(versions) > 1 else ""
        raise RunFailed(
            f"the generator returned a rollout of policy version {rollout.policy_version}, "
            f"the policy is at version {versions[-1]}{begun}"
        )


def incomplete(requests: Sequence[Prompt], rollouts: Sequence[Rollout]) -> list[Prompt]:
    """The requests of which samples are missing in `rollouts`."""
    came: dict[int, set[int]] = {}
    for rollout in rollouts:
        came.setdefault(rollout.group_id, set()).add(rollout.sample)
    return [prompt for prompt in requests if len(came.get(prompt.group_id, ())) < prompt.num_samples]
