"""TRL's side of vs_trl.py: the run file's model, prompts, rewards and settings through GRPOTrainer.

Usage: vs_trl_trl.py OUT.json RUN [a.b=c ...] [trl.NAME=VALUE ...]; the latter are arguments of GRPOConfig
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from datasets import load_dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from varied_run import is_varied, lengths_of

from grpox.policy.precision import dtype_here
from grpox.runfile.load import ResolvedRun, load_run
from grpox.runfile.yaml_lines import read_yaml
from grpox.runtime.phases import PeakMemory

LOSSES = ("grpo", "dr_grpo", "dapo", "bnpo")


class Timed(GRPOTrainer):
    """Adds up the seconds of generation, rewards and everything before the loss."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        super().__init__(*args, **kwargs)

    def _time(self, phase: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            self.seconds[phase] += time.perf_counter() - start

    def _prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
        return self._time("prepare", super()._prepare_inputs, *args, **kwargs)

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        return self._time("generate", super()._generate, *args, **kwargs)

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        return self._time("reward", super()._calculate_rewards, *args, **kwargs)


class StepTimes(TrainerCallback):
    """The seconds of each optimizer step and of its phases, and the mean reward that TRL logs."""

    def __init__(self) -> None:
        self.figures: dict[str, list[float]] = defaultdict(list)
        self.trainer: Timed | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.start = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self.trainer is not None
        step, seconds = time.perf_counter() - self.start, self.trainer.seconds
        self.figures["step"].append(step)
        self.figures["generate"].append(seconds["generate"])
        self.figures["reward"].append(seconds["reward"])
        self.figures["update"].append(step - seconds["prepare"])
        seconds.clear()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "reward" in logs:
            self.figures["rewards"].append(logs["reward"])
            self.figures["mean_length"].append(logs["completions/mean_length"])
            self.figures["uninformative"].append(logs["frac_reward_zero_std"])


def settings(run: ResolvedRun, own: dict[str, Any]) -> GRPOConfig:
    """The run's settings in TRL's names; what the two do not share must be at its neutral value.

    Args:
        own: arguments of GRPOConfig that are told for TRL alone.
    """
    config, train, sampling = run.config, run.config.train, run.config.sampling
    loss: Any = run.components["loss"].config
    assert config.loss.name in LOSSES, config.loss
    assert config.advantage.name == "group", config.advantage
    assert (sampling.top_p, sampling.top_k, sampling.min_p, train.beta) == (1.0, 0, 0.0, 0.0)
    arguments: dict[str, Any] = {
        "output_dir": config.output_dir,
        "model_init_kwargs": {"dtype": dtype_here(config.model)},
        "max_steps": train.max_steps,
        "per_device_train_batch_size": train.per_device_train_batch_size,
        "gradient_accumulation_steps": train.gradient_accumulation_steps,
        "steps_per_generation": run.plan.steps_per_generation,
        "num_generations": train.num_generations,
        "num_iterations": train.num_iterations,
        "learning_rate": train.learning_rate,
        "weight_decay": train.weight_decay,
        "adam_beta1": train.adam_beta1,
        "adam_beta2": train.adam_beta2,
        "adam_epsilon": train.adam_epsilon,
        "max_grad_norm": train.max_grad_norm,
        "lr_scheduler_type": train.lr_scheduler_type,
        "warmup_steps": train.warmup_steps,
        "max_completion_length": sampling.max_completion_length,
        "temperature": sampling.temperature,
        "loss_type": config.loss.name,
        "epsilon": loss.clip_low,
        "epsilon_high": loss.clip_low if loss.clip_high is None else loss.clip_high,
        "beta": 0.0,
        "disable_dropout": True,
        "gradient_checkpointing": False,
        "bf16": dtype_here(config.model) == "bfloat16",
        "seed": train.seed,
        "shuffle_dataset": train.shuffle_dataset,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    return GRPOConfig(**arguments | own)


def main(out: str, source: str, overrides: list[str]) -> None:
    own = dict(given.removeprefix("trl.").split("=", 1) for given in overrides if given.startswith("trl."))
    run = load_run(source, [given for given in overrides if not given.startswith("trl.")])
    arguments = settings(run, {name: read_yaml(value, name).data for name, value in own.items()})
    if is_varied(run):
        from forced_lengths import force_in_transformers, force_in_vllm

        force = force_in_vllm if arguments.use_vllm else force_in_transformers
        force(lengths_of(run))
    assert run.config.data.path is not None
    rewards = [run.build(key) for key in run.components if key.startswith("rewards[")]
    for label, reward in zip(run.config.reward_labels, rewards, strict=True):
        # TRL takes a reward's name from the function.
        reward.__name__ = label
    times = StepTimes()
    times.trainer = Timed(
        model=run.config.model.path,
        reward_funcs=rewards,
        args=arguments,
        train_dataset=load_dataset("json", data_files=run.config.data.path, split="train"),
        callbacks=[times],
    )
    times.trainer.train()
    totals = {"samples": [run.plan.train_batch_size], "peak_gib": [PeakMemory().take() / 2**30]}
    Path(out).write_text(json.dumps({**times.figures, **totals}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
