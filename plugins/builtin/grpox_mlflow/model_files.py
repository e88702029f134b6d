"""What MLflow keeps of a model: MLmodel with its signature, requirements, the card, and perhaps its weights.

The layout is that of MLflow's transformers flavor, so that `mlflow.transformers.load_model` reads it. MLflow's
own writer would load the model to save it once more.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

MLMODEL, REQUIREMENTS, CARD = "MLmodel", "requirements.txt", "README.md"
WEIGHTS, TOKENIZER = "model", "components/tokenizer"
"""Folders of an MLflow model of this flavor."""
_WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt")
_REQUIRED = ("torch", "transformers")
SIGNATURE = {
    "inputs": json.dumps([{"type": "string", "name": "prompt", "required": True}]),
    "outputs": json.dumps([{"type": "string", "name": "completion", "required": True}]),
    "params": None,
}
"""A prompt in, a completion out, as text."""


def size_of(folder: Path) -> int:
    """Bytes of all its files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def tokenizer_files(folder: Path) -> list[Path]:
    """The small files of a Hugging Face folder: tokenizer, chat template, config."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    return [path for path in files if path.name != CARD and not path.name.endswith(_WEIGHT_SUFFIXES)]


def requirements(versions: Mapping[str, str]) -> str:
    """One pip requirement a line: what a Hugging Face folder of this run loads with."""
    return "".join(f"{name}=={version}\n" for name, version in _pinned(versions))


def mlmodel(
    folder: Path,
    uploaded: bool,
    versions: Mapping[str, str],
    model_id: str,
    run_id: str,
    saved: float,
    loadable: bool = True,
) -> str:
    """The file MLmodel.

    Args:
        folder: with the model's files, absolute.
        uploaded: whether the weights lie beside this file; else it points to the folder.
        saved: when, in Unix seconds.
        loadable: whether it is a Hugging Face folder, and no checkpoint that `grpox export` makes one of.
    """
    flavors: dict[str, Any] = {"grpox": {"folder": str(folder), "version": versions.get("grpox", "unknown")}}
    if loadable:
        flavors["transformers"] = _transformers_flavor(folder, uploaded, versions)
    else:
        flavors["grpox"]["export"] = f"grpox export {folder} OUT_DIR"
    told = {
        "artifact_path": model_id,
        "flavors": flavors,
        "mlflow_version": versions.get("mlflow", "unknown"),
        "model_id": model_id,
        "model_size_bytes": size_of(folder),
        "run_id": run_id,
        "signature": SIGNATURE,
        "utc_time_created": datetime.fromtimestamp(saved, UTC).strftime("%Y-%m-%d %H:%M:%S.%f"),
    }
    return str(yaml.safe_dump(told, sort_keys=False, width=1000))


def _transformers_flavor(folder: Path, uploaded: bool, versions: Mapping[str, str]) -> dict[str, Any]:
    place = {"model_binary": WEIGHTS} if uploaded else {"local_base_model_path": str(folder)}
    return {
        "transformers_version": versions.get("transformers", "unknown"),
        "code": None,
        "task": "text-generation",
        "instance_type": "TextGenerationPipeline",
        "pipeline_model_type": "AutoModelForCausalLM",
        "source_model_name": str(folder),
        "components": ["tokenizer"],
        "tokenizer_type": "AutoTokenizer",
        **place,
    }


def _pinned(versions: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for name in _REQUIRED:
        if name in versions:
            # A local part such as +cpu is of a build that no index has.
            yield name, versions[name].partition("+")[0]
