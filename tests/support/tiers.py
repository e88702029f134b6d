"""The folders of tests: those of `make test`, those of `make test-full`, and those that a change asks for.

    python tests/support/tiers.py quick      # folders of `make test`
    python tests/support/tiers.py changed    # the others that the changes since the last full pass ask for
    python tests/support/tiers.py passed     # take note that everything has passed, on a clean tree

The last full pass is the commit that `.ci/full-passed` names. Only Python's own library is imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

ROOT = Path(__file__).parents[2]
PASSED = ROOT / ".ci" / "full-passed"
NO_SOURCES = (".ci/full-passed", "tests/support/durations.json")
"""Files that decide nothing of what is tested: the note itself, and the order in which test files begin."""
QUICK = ("unit", "plugins", "fuzz", "ranks", "runs")
"""The folders of tests/ that `make test` runs."""
REST = ("cold", "packaging", "services/hosts", "services/mlflow", "services/vllm")
"""The others."""
EVERYTHING = ("pyproject.toml", "Makefile", "tests/support/*", "tests/conftest.py", "tests/*/conftest.py")
"""A change to one of these asks for all folders: they decide how every test runs."""

SOURCES: dict[str, tuple[str, ...]] = {
    # The numbers of a step.
    "grpox/policy/chunked_head.py grpox/update/kl.py grpox/policy/row_layout.py grpox/update/loss_call.py grpox/update/mismatch.py grpox/update/objective.py "
    "grpox/update/off_policy_mask.py grpox/update/packing.py grpox/update/reduction.py grpox/policy/reference_sync.py grpox/update/micro_batch.py "
    "grpox/update/step_loss.py grpox/update/token_masks.py grpox/update/policy_update.py grpox/update/forward.py grpox/checkpoint/faults/*": (
        "unit", "ranks", "runs",
    ),
    # Built-in algorithms.
    "plugins/builtin/grpox_losses/* plugins/builtin/grpox_advantages/* plugins/builtin/grpox_corrections/* "
    "plugins/builtin/grpox_rewards/*": ("unit", "plugins", "runs"),
    # The model, its engine and its weights on the way to a generator.
    "grpox/policy/deepspeed_config.py grpox/policy/engine.py grpox/policy/forward_modes.py grpox/policy/from_lists.py grpox/policy/logprobs.py "
    "grpox/policy/buffers.py grpox/policy/lora/* grpox/policy/model_source.py grpox/policy/models.py grpox/policy/optimizers.py grpox/policy/batch.py "
    "grpox/policy/weight_stream.py": (
        "unit", "ranks", "runs", "services/vllm",
    ),
    "plugins/builtin/grpox_generators/*": ("unit", "plugins", "runs", "services/vllm"),
    "plugins/builtin/grpox_vllm_serving/*": ("unit", "cold", "services/vllm", "services/hosts"),
    "plugins/builtin/grpox_mlflow/*": ("unit", "plugins", "runs", "services/mlflow", "services/hosts"),
    # Sampling, scoring and what is recorded of it.
    "grpox/rollout/prefetch.py grpox/rollout/validation.py grpox/rollout/sampler.py grpox/data/prompt_cursor.py grpox/rollout/dynamic_sampling.py "
    "grpox/rollout/streaming_scorer.py grpox/rollout/fixed_policy.py grpox/data/schedule.py grpox/rollout/scored.py": (
        "unit", "ranks", "runs", "services/vllm",
    ),
    "grpox/rollout/metrics.py grpox/update/token_metrics.py grpox/observing/* grpox/observing/report/* grpox/observing/step_metrics.py "
    "grpox/observing/early_stop.py": ("unit", "plugins", "runs", "services/mlflow"),
    "grpox/rollout/rewards/* grpox/rollout/rewards/weighted_sum.py": ("unit", "plugins", "runs", "cold"),
    "grpox/data/*": ("unit", "fuzz", "runs"),
    # A run as a whole, and its checkpoints.
    "grpox/training/run.py grpox/training/inputs.py grpox/runtime/run_lock.py grpox/training/trainer.py grpox/runfile/given/* grpox/contracts.py "
    "grpox/__init__.py": (
        "unit", "ranks", "runs", *REST,
    ),
    "grpox/checkpoint/* grpox/checkpoint/save_model.py grpox/checkpoint/hub.py grpox/checkpoint/model_card.py grpox/policy/saved_whole.py": (
        "unit", "ranks", "runs", "services/mlflow", "services/hosts",
    ),
    "grpox/training/evaluate_model.py grpox/training/evaluation.py grpox/training/evaluation_metrics.py grpox/config/evaluation.py "
    "grpox/training/pass_at_k.py": ("unit", "runs", "services/vllm"),
    # Processes: how they start, meet, hear signals, wait and end.
    "grpox/__main__.py grpox/runtime/collective_errors.py grpox/runtime/tcp_keepalive.py grpox/runtime/environment.py grpox/runtime/lazy_imports.py "
    "grpox/runtime/launch.py grpox/runtime/launchers/* grpox/runtime/lost_rank.py grpox/runtime/rendezvous.py grpox/runtime/out_of_memory.py "
    "grpox/runtime/private_files.py grpox/runtime/setup.py grpox/runtime/quick_transformers.py grpox/policy/deepspeed_import.py "
    "grpox/runtime/signals.py grpox/runtime/watchdog.py grpox/runtime/files.py grpox/runtime/world.py": ("unit", "ranks", "runs", *REST),
    "grpox/cli/* grpox/cli/doctor/* grpox/policy/memory_plan/*": ("unit", "fuzz", "runs", "cold"),
    # Run files, what may stand in them, and what users are told.
    "grpox/config/schema.py grpox/errors/problem.py grpox/errors/field_types.py grpox/errors/validation.py grpox/errors/redaction.py grpox/runfile/* "
    "grpox/errors/warn_once.py grpox/errors/formatting.py": ("unit", "fuzz", "runs", "cold"),
    "grpox/runfile/from_trl/*": ("unit",),
    "grpox/runfile/recipes/*": ("unit", "runs", "cold", "packaging", "services/vllm"),
    # Plugins: found, bound, made, checked.
    "grpox/plugins/api_version.py grpox/plugins/component.py grpox/plugins/component_call.py grpox/plugins/deprecation.py grpox/plugins/hookspecs.py "
    "grpox/plugins/path_types.py grpox/plugins/load_object.py grpox/runfile/lock/* grpox/plugins/loader.py grpox/plugins/cache.py "
    "grpox/plugins/fingerprint.py grpox/plugins/discovery.py grpox/plugins/registry.py grpox/runfile/required_plugins.py grpox/plugins/requirements.py": (
        "unit", "plugins", "runs", "cold", "packaging",
    ),
    "grpox/testing/pytest_plugin.py grpox/plugins/scaffold/* grpox/testing/*": ("unit", "runs", "cold", "packaging"),
    "grpox/py.typed": ("packaging",),
    "plugins/examples/* plugins/README.md LICENSE": ("packaging",),
    # Pages, whose commands and code are run; examples and benchmarks, of which tests run some.
    "README.md docs/* mkdocs.yml": ("unit", "runs", "cold"),
    "docs/vllm.md docs/many-nodes.md": ("cold", "services/vllm", "services/hosts"),
    "examples/*": ("unit",),
    "benchmarks/*": ("unit", "runs"),
    "requirements/*": ("services/vllm",),
}  # fmt: skip
"""Patterns of sources, which cross folders, and the folders of tests that see them. All rows that match
count."""


def folders_for(path: str) -> set[str]:
    """Return the folders of tests that see a file, given by its path in the repository."""
    if any(fnmatchcase(path, pattern) for pattern in EVERYTHING):
        return {*QUICK, *REST}
    found = {folder for folder in (*QUICK, *REST) if path.startswith(f"tests/{folder}/")}
    for patterns, folders in SOURCES.items():
        if any(fnmatchcase(path, pattern) for pattern in patterns.split()):
            found.update(folders)
    return found


def folders_for_change() -> list[str]:
    """Return the folders that must run beside those of `make test`; all where changes are not known."""
    if os.environ.get("GRPOX_TEST_FULL") == "1":
        return list(REST)
    changed = changed_paths()
    if changed is None:
        return list(REST)
    wanted = set().union(*map(folders_for, changed))
    return [folder for folder in REST if folder in wanted]


def changed_paths() -> list[str] | None:
    """Return the files that differ from the last full pass; None where that is not known."""
    if not PASSED.exists():
        return None
    commit = PASSED.read_text().strip()
    if _git("merge-base", "--is-ancestor", commit, "HEAD") is None:
        return None
    committed = _git("diff", "--name-only", "--no-renames", commit)
    untracked = _git("ls-files", "--others", "--exclude-standard")
    if committed is None or untracked is None:
        return None
    return [path for path in (*committed, *untracked) if path not in NO_SOURCES]


def note_full_pass() -> str:
    """Name the current commit in `.ci/full-passed` if the tree is clean, and return what was done."""
    name = PASSED.relative_to(ROOT).as_posix()
    status = _git("status", "--porcelain")
    head = _git("rev-parse", "HEAD")
    if head is None or status is None:
        return f"{name} is left as it is: this is no git checkout"
    if any(line[3:] not in NO_SOURCES for line in status):
        return f"{name} is left as it is: the tree has changes that are not committed"
    PASSED.write_text(f"{head[0]}\n")
    return f"{name} now names {head[0]}: commit it"


def _git(*arguments: str) -> list[str] | None:
    """Return the lines that git prints, or None where it fails."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.splitlines() if done.returncode == 0 else None


def paths_of(folders: Iterable[str]) -> str:
    return " ".join(f"tests/{folder}" for folder in folders)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["quick"]:
            print(paths_of(QUICK))
        case ["changed"]:
            print(paths_of(folders_for_change()))
        case ["passed"]:
            print(note_full_pass())
        case _:
            sys.exit(__doc__)
