"""Whether `hub` names a repository as the hub takes it."""

from __future__ import annotations

from grpox.config import HubConfig
from grpox.errors import Problem


def hub_problems(config: HubConfig | None) -> list[Problem]:
    """A repository name or branch that the hub would refuse after the training."""
    if config is None:
        return []
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    problems = []
    try:
        validate_repo_id(config.repo)
        if "/" not in config.repo:
            problems.append(Problem("names no owner", "hub.repo", given=config.repo, allowed="user/name"))
    except HFValidationError as error:
        what = str(error).split(":")[0].rstrip(".")
        problems.append(Problem(what, "hub.repo", given=config.repo, allowed="user/name"))
    if config.revision is not None and (not config.revision or config.revision.isspace()):
        problems.append(Problem("is empty", "hub.revision", allowed="a branch's name, or null"))
    return problems
