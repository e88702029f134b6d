"""Follows a run into Weights & Biases: metrics, config, completions, summary and outcome.

| in W&B | when | content |
|---|---|---|
| config | the start | the run file with its defaults, below ``grpox`` versions and git commit |
| a metric's name | each step | the number of ``metrics.jsonl``, over ``step`` |
| ``evaluation/<name>`` | each evaluation | likewise |
| ``completions`` | every ``completions_every`` generation batches | a table |
| summary | the end | the values of ``summary.json``; of a failed run ``error`` |
| state | the end | finished, failed, or killed by Ctrl-C or SIGTERM |
"""

from __future__ import annotations

import json
import math
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpox import hookimpl
from grpox.errors import redact, redacted
from grpox.runtime.logs import get_logger
from grpox.toolkit import preserve_env, read_mapping, write_atomically

if TYPE_CHECKING:
    import wandb
    from grpox.contracts import RunContext, ScoredRollout

    from grpox_wandb.config import WandbConfig

logger = get_logger(__name__)
RECORD = "wandb.json"
"""File in the run's folder with the id of the W&B run, under which a resumed run continues."""
FOLDER = "wandb"
"""Folder in the run's folder with wandb's own files."""
FAILED, KILLED = 1, 255
"""Exit codes by which W&B shows a run as failed or as killed."""


class Wandb:
    """Methods named after lifecycle hooks, called on rank 0; each names the arguments that it needs.

    The run is no global run of wandb's, so a run that the caller has open is neither read nor changed.
    """

    files = (RECORD, FOLDER)
    stateless = True

    def __init__(self, config: WandbConfig) -> None:
        self.config = config
        self._run: wandb.Run | None = None
        self._owns_service = False

    @hookimpl
    def grpox_run_started(self, run: RunContext) -> None:
        """Start the W&B run, or continue that of a resumed run; an error here ends the run."""
        # Imported here as it takes seconds, which `grpox validate` need not wait for.
        import wandb

        # Absolute, because the process may change folders.
        self._folder = run.output_dir.absolute()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._batches = run.generations_before
        self._owns_service = "WANDB_SERVICE" not in os.environ
        mode = self._mode()
        try:
            self._run = self._init(run, mode)
        except wandb.errors.AuthenticationError:
            raise
        except wandb.errors.CommError as error:
            logger.warning(
                "W&B does not answer: %s\n    the run continues offline; upload it afterwards with wandb sync",
                redact(str(error).partition("\n")[0]),
            )
            self._run = self._init(run, "offline")
        # Over grpox's step, as W&B's own counts calls, and refuses steps that a resumed run repeats.
        self._run.define_metric("*", step_metric="step")
        if not self._run.disabled:
            record = {"id": self._run.id, "project": self._run.project, "url": self._run.url}
            write_atomically(self._folder / RECORD, json.dumps(record, indent=2) + "\n")

    @hookimpl
    def grpox_rollouts_scored(self, step: int, rollouts: Sequence[ScoredRollout]) -> None:
        """Log a table of the first completions of the batch, unless this batch is left out."""
        is_shown = self._batches % self.config.completions_every == 0
        self._batches += 1
        if is_shown and self.config.completions and rollouts:
            # Tables are artifacts, whose files would else wait in the user's home for their upload.
            with preserve_env("WANDB_DATA_DIR"):
                os.environ.setdefault("WANDB_DATA_DIR", str(self._folder / FOLDER))
                self._log(step, {"completions": completions_table(rollouts[: self.config.completions])})

    @hookimpl
    def grpox_step_finished(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log a step's metrics."""
        self._log(step, metrics)

    @hookimpl
    def grpox_evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log an evaluation's metrics under ``evaluation/``."""
        prefix = "evaluation/"
        self._log(step, {prefix + name.removeprefix(prefix): metrics[name] for name in metrics})

    @hookimpl
    def grpox_run_failed(self, error: BaseException) -> None:
        """End the W&B run as failed, or as killed if the run was interrupted."""
        text = redact(f"{type(error).__name__}: {error}".removesuffix(": "))
        self._end({"error": text}, FAILED if isinstance(error, Exception) else KILLED)

    @hookimpl
    def grpox_run_finished(self, summary: Mapping[str, object]) -> None:
        """Add the summary's values, and end the W&B run."""
        self._end(redacted(dict(summary)), 0)

    def _mode(self) -> str:
        """Return the mode that the run file or the environment names, else that which the credentials allow."""
        import wandb

        # Silent, as its lines would break up the display of the run.
        settings = wandb.setup(wandb.Settings(silent=True) if self._owns_service else None).settings
        mode = self.config.mode or settings.mode
        is_chosen = self.config.mode or "WANDB_MODE" in os.environ or mode != "online"
        # Without a check of the key here: `init` makes the same request.
        return mode if is_chosen or wandb.login(prompt=False, verify=False) else "offline"

    def _init(self, run: RunContext, mode: str) -> wandb.Run:
        import wandb

        config = self.config
        defaults = wandb.setup().settings  # those of the environment
        previous = None if run.resumed_at is None else read_mapping(self._folder / RECORD).get("id")
        facts = {"versions": dict(run.versions), "git_commit": run.git_commit, "world_size": run.world_size}
        return wandb.init(
            project=config.project or defaults.project or "grpox",
            entity=config.entity,
            name=config.run_name or defaults.run_name or self._folder.name,
            group=config.group,
            tags=config.tags or None,
            config=redacted({**run.config.model_dump(mode="json"), "grpox": facts}),
            dir=self._folder,
            id=previous,
            resume="allow",
            mode=mode,
            reinit="create_new",
            settings=wandb.Settings(
                silent=True,
                console="off",  # the run's display redraws its lines
                x_disable_meta=True,  # it has the command line, which may have secrets
                init_timeout=config.timeout,
                finish_timeout=config.timeout,
                finish_timeout_raises=True,
            ),
        )

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        if self._run is None:
            raise RuntimeError("the W&B run was never started, or has ended")
        self._run.log({"step": step, **values})

    def _end(self, summary: Mapping[str, Any], exit_code: int) -> None:
        import wandb

        run, self._run = self._run, None
        try:
            if run is not None:
                run.summary.update(summary)
                run.finish(exit_code=exit_code)
                if not run.disabled:
                    place = run.url or f"wandb sync {shlex.quote(str(Path(run.dir).parent))}"
                    logger.info("W&B run %s: %s", run.id, place)
        finally:
            owns_service, self._owns_service = self._owns_service, False
            # The service is a process; a run that the caller has open needs it.
            if owns_service and wandb.run is None:
                wandb.teardown(exit_code)


def completions_table(rollouts: Sequence[ScoredRollout]) -> wandb.Table:
    """Build a table with a row for each completion: its texts, its rewards, and how it ended."""
    import wandb

    labels = list(dict.fromkeys(label for scored in rollouts for label in scored.rewards))
    columns = ["group", "prompt", "completion", "reward", "advantage"]
    columns += [f"rewards/{label}" for label in labels] + ["finish_reason"]
    rows = [
        [
            *(scored.rollout.group_id, scored.prompt, scored.completion),
            # The table is JSON, which has no NaN.
            None if math.isnan(scored.reward) else scored.reward,
            scored.advantage,
            *(scored.rewards.get(label) for label in labels),
            scored.rollout.finish_reason,
        ]
        for scored in rollouts
    ]
    return wandb.Table(columns=columns, data=rows)
