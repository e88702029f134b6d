"""The trained model on the Hugging Face hub: asked before the run, pushed after it, with its model card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from grpox import __version__
from grpox.checkpoint.model_card import FILE as CARD
from grpox.checkpoint.model_card import write_card
from grpox.config import HubConfig, RunConfig
from grpox.errors import ConfigError, Problem, RunFailed, text_of

HUB_SECONDS = 10.0
"""How long the hub may take to say who we are."""


def check_hub(config: HubConfig) -> None:
    """Ask the hub whose token this is, so that a run does not end with a model it cannot push.

    Raises:
        ConfigError: there is no token, the hub refuses it or does not answer, or it may not write there.
    """
    from huggingface_hub import constants, get_session, get_token, hf_raise_for_status

    token = get_token()
    if token is None:
        what = "there is no token for the hub: set HF_TOKEN, or run `hf auth login`"
        raise ConfigError(Problem(what, "hub.repo", given=config.repo))
    try:
        # HfApi.whoami has no timeout.
        url, headers = f"{constants.ENDPOINT}/api/whoami-v2", {"authorization": f"Bearer {token}"}
        answer = get_session().get(url, headers=headers, timeout=HUB_SECONDS)
        hf_raise_for_status(answer)
        user: dict[str, Any] = answer.json()
    except Exception as error:
        what = f"the hub cannot be used: {_reason(error)}"
        raise ConfigError(Problem(what, "hub.repo", given=config.repo)) from error
    _check_rights(user, config.repo)


def push_model(folder: Path, config: RunConfig, hub: HubConfig, summary: dict[str, Any]) -> str:
    """Push the folder of the trained model; one that lacks a model card gets it.

    Returns:
        the address of the repository.

    Raises:
        RunFailed: the push failed; names the folder and the command that pushes it by hand.
    """
    from huggingface_hub import HfApi

    if not (folder / CARD).exists():
        write_card(folder, config, summary)
    api = HfApi(library_name="grpox", library_version=__version__)
    try:
        address = api.create_repo(hub.repo, private=hub.private, exist_ok=True)
        if hub.revision is not None:
            api.create_branch(hub.repo, branch=hub.revision, exist_ok=True)
        message = f"Trained with grpox {__version__}"
        api.upload_folder(repo_id=hub.repo, folder_path=folder, revision=hub.revision, commit_message=message)
    except Exception as error:
        branch = f" --revision {hub.revision}" if hub.revision else ""
        options = (" --private" if hub.private else "") + branch
        raise RunFailed(
            f"the model is trained and lies in {folder}, but the push to {hub.repo} failed: {_reason(error)}\n"
            f"push it by hand: hf upload {hub.repo} {folder}{options}"
        ) from error
    return str(address)


def _check_rights(user: dict[str, Any], repo: str) -> None:
    """Refuse what the hub says about the token that would fail at the push."""
    role = user.get("auth", {}).get("accessToken", {}).get("role")
    if role == "read":
        what = f"the token of '{user.get('name')}' may only read: the push needs one that may write"
        raise ConfigError(Problem(what, "hub.repo", given=repo))
    owners = [user.get("name"), *(org.get("name") for org in user.get("orgs", []))]
    # What a fine-grained token may reach is not told here; the push itself will say.
    if role == "write" and repo.partition("/")[0] not in owners:
        what = f"the token is of '{user.get('name')}', who has no such namespace"
        raise ConfigError(Problem(what, "hub.repo", given=repo, allowed=", ".join(filter(None, owners))))


def _reason(error: Exception) -> str:
    lines = [line for line in text_of(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
