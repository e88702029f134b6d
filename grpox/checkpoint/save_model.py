"""The trained model for others: a plain Hugging Face folder, its model card, and its place on the hub.

The card names the base model, the data, the settings and the results. Access to the hub is checked before the
run, and the model is pushed after it.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from safetensors import SafetensorError
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase

from grpox import __version__
from grpox.checkpoint.folders import checkpoints_in
from grpox.config import HubConfig, RunConfig
from grpox.errors import ConfigError, RunFailed, text_of
from grpox.errors.redaction import redact, redacted
from grpox.policy.engine import Engine
from grpox.policy.model_folder import save_whole
from grpox.runfile.objects import GIVEN
from grpox.runfile.yaml_lines import Dumper
from grpox.runtime.files import put_in_place, write_atomically, write_error_message
from grpox.runtime.world import World

CARD = "README.md"
HUB_SECONDS = 10.0
"""Time limit of the hub's answer."""
_SHOWN = ("reward", "loss", "kl", "entropy", "grad_norm", "completions/mean_length")
"""Metrics of the last step that the card shows, besides all of the last evaluation."""


def save_model(
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    generation_config: GenerationConfig | None,
    folder: Path,
    world: World,
) -> None:
    """Gather the weights bucket by bucket and write them on rank 0, whole or not at all; a collective.

    Raises:
        RunFailed: they cannot be written, or a reload would not find all of them; on every rank. An earlier
            model in `folder` stays.
    """
    state = weights_on_main(engine.weights(), world)
    size, failure = sum(tensor.nbytes for tensor in state.values()), ""
    if world.is_main:
        unfinished = folder.with_name(folder.name + ".unfinished")
        try:
            shutil.rmtree(unfinished, ignore_errors=True)
            save_whole(engine.module, unfinished, state)
            tokenizer.save_pretrained(unfinished)
            if generation_config is not None:
                generation_config.save_pretrained(unfinished)
            put_in_place(unfinished, folder)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            failure = f"the model is not saved: {write_error_message(error, folder, size)}"
        except RunFailed as error:
            failure = str(error)
    if failure:
        checkpoints = checkpoints_in(folder.parent)
        rest = "there is no checkpoint to go on from (checkpoint.every says when one is saved)"
        if checkpoints:
            rest = f"make room, then go on from {checkpoints[0]}: grpox train --resume {folder.parent}"
        failure += f"\n    {rest}"
    if any(failures := world.gather([failure])):
        raise RunFailed("".join(failures))


def weights_on_main(weights: Iterable[tuple[str, Tensor]], world: World) -> dict[str, Tensor]:
    """Gather weights bucket by bucket into CPU memory on rank 0; a collective."""
    return {name: tensor.cpu() for name, tensor in weights if world.is_main}


def model_card(
    config: RunConfig,
    summary: Mapping[str, Any],
    fingerprints: Mapping[str, str] | None = None,
    metrics: Mapping[str, float] | None = None,
) -> str:
    """Return the card, with the hub's front matter, without folders of this machine and without secrets.

    Args:
        summary: the content of ``summary.json``.
        fingerprints: key of the run file -> fingerprint of the file it names.
        metrics: metrics of the last step, those of evaluations below ``evaluation/``.
    """
    base, name = Path(config.model.path), _shown(config.model.path)
    # Only a hub id can be a link; a local path says nothing to others.
    known = f"base_model: {base}\n" if not base.is_absolute() and config.model.path != GIVEN else ""
    title = config.hub.repo.rpartition("/")[2] if config.hub else Path(config.output_dir).name or name
    shown = {
        metric: f"{value:.4g}"
        for metric, value in (metrics or {}).items()
        if metric in _SHOWN or metric.startswith("evaluation/")
    }
    results = f"## Metrics\n\nOf the last step and evaluation.\n\n{_table('| metric | value |', shown)}"
    dumped = _without_folders(redacted(config.model_dump(mode="json")))
    run_file = yaml.dump(dumped, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=110)
    return redact(
        f"---\nlibrary_name: transformers\npipeline_tag: text-generation\n{known}tags: [grpo, grpox]\n---\n\n"
        f"# {title}\n\n"
        f"Trained with GRPO by grpox {__version__} on DeepSpeed ZeRO-3.\n\n"
        f"{_table('| | |', _rows(config, name, summary, fingerprints or {}))}"
        f"{results if shown else ''}"
        f"## Run file\n\n```yaml\n{run_file}```\n"
    )


def _rows(
    config: RunConfig, name: str, summary: Mapping[str, Any], fingerprints: Mapping[str, str]
) -> dict[str, object]:
    rewards = zip(config.reward_labels, config.rewards, strict=True)
    source = config.data.source
    data = _shown(config.data.path or "") if source is None else source.label
    rows: dict[str, object] = {
        "base model": name,
        "data": data + _digest(fingerprints.get("data.path")),
        "rewards": ", ".join(f"{label} (weight {ref.weight:g})" for label, ref in rewards),
        "advantage": config.advantage.label,
        "loss": config.loss.label,
        "correction": config.correction.label,
        "optimizer steps": summary["steps"],
        "completions per prompt": config.train.num_generations,
        "learning rate": f"{config.train.learning_rate:g}",
        "seed": config.train.seed,
    }
    if config.evaluation is not None:
        sets = config.evaluation.set_paths.items()
        rows["evaluated on"] = ", ".join(_shown(path) + _digest(fingerprints.get(key)) for key, path in sets)
    for key in summary:
        if key.startswith(("accuracy_", "success_", "rewards/")):
            rows[key.replace("_", " ")] = f"{summary[key]:.4f}"
    return rows


def _table(heading: str, rows: Mapping[str, object]) -> str:
    return "\n".join([heading, "|---|---|", *(f"| {key} | {rows[key]} |" for key in rows)]) + "\n\n"


def _without_folders(value: Any) -> Any:
    """Replace each absolute path in `value` with its last part."""
    if isinstance(value, Mapping):
        return {key: _without_folders(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_folders(item) for item in value]
    if isinstance(value, str) and value.startswith("/") and "\n" not in value:
        return Path(value).name or value
    return value


def _digest(fingerprint: str | None) -> str:
    """Format `` (sha256 0123456789abcdef)``; a large file's hash is of its size, beginning and end."""
    if fingerprint is None:
        return ""
    return f" (sha256 {fingerprint.rpartition(' ')[2][:16]})"


def _shown(path: str) -> str:
    """Return a local file's name, or a hub id."""
    return Path(path).name if Path(path).is_absolute() else str(Path(path))


def check_hub(config: HubConfig) -> None:
    """Check the token before the run, so that the hub does not refuse the model after it.

    Raises:
        ConfigError: there is no token, the hub refuses it or does not answer, or it may not write there.
    """
    from huggingface_hub import constants, get_session, get_token, hf_raise_for_status

    token = get_token()
    if token is None:
        what = "there is no token for the hub: set HF_TOKEN, or run `hf auth login`"
        raise ConfigError(what, "hub.repo", given=config.repo)
    try:
        # HfApi.whoami has no timeout.
        url, headers = f"{constants.ENDPOINT}/api/whoami-v2", {"authorization": f"Bearer {token}"}
        answer = get_session().get(url, headers=headers, timeout=HUB_SECONDS)
        hf_raise_for_status(answer)
        user: dict[str, Any] = answer.json()
    except Exception as error:
        raise ConfigError(f"the hub cannot be used: {_reason(error)}", "hub.repo", given=config.repo) from error
    role = user.get("auth", {}).get("accessToken", {}).get("role")
    owners = [user.get("name"), *(org.get("name") for org in user.get("orgs", []))]
    if role == "read":
        what = f"the token of '{user.get('name')}' may only read: the push needs one that may write"
        raise ConfigError(what, "hub.repo", given=config.repo)
    # The hub does not say here which repositories a fine-grained token may write.
    if role == "write" and config.repo.partition("/")[0] not in owners:
        what, allowed = f"the token is of '{user.get('name')}', who has no such namespace", filter(None, owners)
        raise ConfigError(what, "hub.repo", given=config.repo, allowed=", ".join(allowed))


def push_model(folder: Path, config: RunConfig, hub: HubConfig, summary: dict[str, Any]) -> str:
    """Push the folder of the trained model, with a model card if it lacks one.

    Returns:
        the address of the repository.

    Raises:
        RunFailed: the push failed; the message has the command to push by hand.
    """
    from huggingface_hub import HfApi

    if not (folder / CARD).exists():
        write_atomically(folder / CARD, model_card(config, summary))
    api = HfApi(library_name="grpox", library_version=__version__)
    try:
        address = api.create_repo(hub.repo, private=hub.private, exist_ok=True)
        if hub.revision is not None:
            api.create_branch(hub.repo, branch=hub.revision, exist_ok=True)
        message = f"Trained with grpox {__version__}"
        api.upload_folder(repo_id=hub.repo, folder_path=folder, revision=hub.revision, commit_message=message)
    except Exception as error:
        options = " --private" if hub.private else ""
        options += f" --revision {hub.revision}" if hub.revision else ""
        raise RunFailed(
            f"the model is trained and lies in {folder}, but the push to {hub.repo} failed: {_reason(error)}\n"
            f"push it by hand: hf upload {hub.repo} {folder}{options}"
        ) from error
    return str(address)


def _reason(error: Exception) -> str:
    lines = [line for line in text_of(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
