"""The README.md of every model that is saved: what it was trained from and on, how, and what became of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from grpox import __version__
from grpox.config import RewardRef, RunConfig
from grpox.errors.redaction import redact, redacted
from grpox.runfile.given import GIVEN
from grpox.runfile.yaml_lines import Dumper
from grpox.runtime.files import write_whole

FILE = "README.md"
DIGEST = 16
"""Hexadecimal digits of a fingerprint that are shown."""
_SHOWN = ("reward", "loss", "kl", "entropy", "grad_norm", "completions/mean_length")
"""Metrics of the last step that the card shows, besides all of the last evaluation."""


def write_card(
    folder: Path,
    config: RunConfig,
    summary: Mapping[str, Any],
    fingerprints: Mapping[str, str] | None = None,
    metrics: Mapping[str, float] | None = None,
) -> None:
    """Write the card into the folder of a model; raises OSError with the file's name where it cannot be."""
    write_whole(folder / FILE, model_card(config, summary, fingerprints, metrics))


def model_card(
    config: RunConfig,
    summary: Mapping[str, Any],
    fingerprints: Mapping[str, str] | None = None,
    metrics: Mapping[str, float] | None = None,
) -> str:
    """The card, with the front matter that the hub reads. It names no folder of this machine and no secret.

    Args:
        summary: what ``summary.json`` holds.
        fingerprints: key of the run file -> fingerprint of the file it names.
        metrics: of the last step, those of evaluations below ``evaluation/``.
    """
    base = Path(config.model.path)
    # Only a hub id can be a link; a local path says nothing to others.
    is_id = not base.is_absolute() and config.model.path != GIVEN
    name, known = (str(base), f"base_model: {base}\n") if is_id else (base.name, "")
    title = config.hub.repo.rpartition("/")[2] if config.hub else Path(config.output_dir).name or name
    return redact(
        f"---\nlibrary_name: transformers\npipeline_tag: text-generation\n{known}tags: [grpo, grpox]\n---\n\n"
        f"# {title}\n\n"
        f"Trained with GRPO by grpox {__version__} on DeepSpeed ZeRO-3.\n\n"
        f"{_table(('', ''), _facts(config, name, summary, fingerprints or {}))}"
        f"{_metrics_section(metrics or {})}"
        f"## Run file\n\n```yaml\n{_run_file(config)}```\n"
    )


def _facts(
    config: RunConfig, name: str, summary: Mapping[str, Any], fingerprints: Mapping[str, str]
) -> dict[str, object]:
    rows: dict[str, object] = {
        "base model": name,
        "data": _data(config) + _digest(fingerprints.get("data.path")),
        "rewards": ", ".join(f"{label} (weight {ref.weight:g})" for label, ref in _rewards(config)),
        "advantage": config.advantage.label,
        "loss": config.loss.label,
        "correction": config.correction.label,
        "optimizer steps": summary["steps"],
        "completions per prompt": config.train.num_generations,
        "learning rate": f"{config.train.learning_rate:g}",
        "seed": config.train.seed,
    }
    if config.evaluation is not None:
        held_out = Path(config.evaluation.path)
        shown = held_out.name if held_out.is_absolute() else str(held_out)
        rows["evaluated on"] = shown + _digest(fingerprints.get("evaluation.path"))
    for key in ("accuracy_before", "accuracy_after"):
        if key in summary:
            rows[key.replace("_", " ")] = f"{summary[key]:.4f}"
    return rows


def _metrics_section(metrics: Mapping[str, float]) -> str:
    shown = {
        metric: f"{value:.4g}"
        for metric, value in metrics.items()
        if metric in _SHOWN or metric.startswith("evaluation/")
    }
    return (
        f"## Metrics\n\nOf the last step and evaluation.\n\n{_table(('metric', 'value'), shown)}"
        if shown
        else ""
    )


def _table(heading: tuple[str, str], rows: Mapping[str, object]) -> str:
    lines = [f"| {heading[0]} | {heading[1]} |", "|---|---|", *(f"| {key} | {rows[key]} |" for key in rows)]
    return "\n".join(lines).replace("|  |  |", "| | |") + "\n\n"


def _run_file(config: RunConfig) -> str:
    """The whole config, with the names of local files in place of their paths."""
    dumped = _without_folders(redacted(config.model_dump(mode="json")))
    return str(yaml.dump(dumped, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=110))


def _without_folders(value: Any) -> Any:
    """`value`, in which each text that is an absolute path is its last part."""
    if isinstance(value, Mapping):
        return {key: _without_folders(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_folders(item) for item in value]
    if isinstance(value, str) and value.startswith("/") and "\n" not in value:
        return Path(value).name or value
    return value


def _digest(fingerprint: str | None) -> str:
    """`` (sha256 0123456789abcdef)``; of a large file it is that of its size, beginning and end."""
    if fingerprint is None:
        return ""
    return f" (sha256 {fingerprint.rpartition(' ')[2][:DIGEST]})"


def _rewards(config: RunConfig) -> Iterator[tuple[str, RewardRef]]:
    return zip(config.reward_labels, config.rewards, strict=True)


def _data(config: RunConfig) -> str:
    """A file's name, a hub id, or the name of the component."""
    if config.data.source is not None:
        return config.data.source.label
    path = Path(config.data.path or "")
    return path.name if path.is_absolute() else str(path)
