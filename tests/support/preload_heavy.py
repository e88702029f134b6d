"""Imports for the fork server: everything that a run of grpox imports, in the same order."""

from __future__ import annotations

import grpox.training.run  # isort: skip # first, since it imports transformers and DeepSpeed in its own way

import importlib
import pkgutil
from types import ModuleType

import grpox_advantages
import grpox_corrections
import grpox_environments
import grpox_generators
import grpox_losses
import grpox_mlflow
import grpox_rewards
import grpox_vllm_serving

LIBRARIES = (
    "alembic.command", "deepspeed.module_inject.auto_ep_layer", "deepspeed.ops.adam",
    "deepspeed.runtime.superoffload.superoffload_stage3", "deepspeed.runtime.zero.muon.muon_optimizer",
    "mlflow.store.tracking.sqlalchemy_workspace_store", "mlflow.tracking", "peft", "scipy.io",
    "scipy.optimize", "sqlalchemy.dialects.sqlite", "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
)  # fmt: skip
"""Imported by runs late, when they need them."""
SKIPPED = (
    "grpox.__main__",
    "grpox.runfile.recipes",
    "grpox.rollout.rewards.worker",
    "grpox_rewards.code_",
    "grpox_vllm_serving.",
    "grpox.testing.pytest_plugin",
)
PACKAGES = (
    grpox, grpox_advantages, grpox_corrections, grpox_environments, grpox_generators, grpox_losses,
    grpox_mlflow, grpox_rewards, grpox_vllm_serving,
)  # fmt: skip


def import_all(package: ModuleType) -> None:
    """Import every module of a package, but those that are programs or need vLLM."""
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not found.name.startswith(SKIPPED):
            try:
                importlib.import_module(found.name)
            except ModuleNotFoundError as error:
                if (error.name or "").partition(".")[0] != "vllm":
                    raise


for library in LIBRARIES:
    importlib.import_module(library)
for each in PACKAGES:
    import_all(each)
