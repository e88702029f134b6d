"""Bad command lines: overrides, runs, ranks, and what the other commands are given."""

from __future__ import annotations

import os
from pathlib import Path

from fuzz_case import RUN, Case, nothing, numbered, raw, run_file, together

GOOD = run_file(RUN)


def command_cases() -> list[Case]:
    """All of them; each has a name of its own."""
    return [*_overrides(), *_runs(), *_resumed(), *_others()]


def _overrides() -> list[Case]:
    given: dict[str, tuple[str, ...]] = {
        "train.max_steps": ("key=value", "train.max_steps"),
        "=5": ("needs a key", "=5"),
        "a..b=1": ("needs a key", "a..b=1"),
        "a.b=": ("a", "unknown key"),
        "train.max_steps=": ("train.max_steps",),
        "rewards.99.weight=1": ("rewards[99]", "from 0 to"),
        "rewards.-1.weight=1": ("rewards", "-1"),
        "rewards.x.weight=1": ("rewards", "x"),
        "rewards.1.weight=1": ("rewards[1]",),
        "output_dir.x.y=1": ("output_dir", "no keys can be below"),
        "train.max_steps.x=1": ("train.max_steps", "no keys can be below"),
        "loss.clip_hihg=0.3": ("loss.clip_hihg", "clip_high"),
        "train={max_steps: 1": ("train", "command line"),
        "train=5": ("train", "command line"),
        "train.max_steps=[1": ("train.max_steps",),
        "train.max_steps=!!python/object:os.system": ("train.max_steps",),
        "train.max_steps=*x": ("train.max_steps", "x"),
        "train.max_steps=.nan": ("train.max_steps", "not a number"),
        "train.learning_rate=1e999": ("train.learning_rate", "too large"),
        "train.learning_rate=abc\x1b[31m": ("train.learning_rate",),
        "train.seed=99999999999999999999999999": ("train.seed",),
        "loss=\udcff": ("loss",),
        "loss=x\u202ey": ("loss", "\\u202e"),
        "\x1b[31mkey=1": ("\\x1b[31mkey",),
        "data.path=\u2028.jsonl": ("data.path",),
        "model=null": ("model",),
        "rewards=[]": ("rewards",),
        "tracking=mlflow": ("tracking",),
        "tracking.wandb.project=x": ("tracking.wandb",),
        "train." + "x." * 3000 + "y=1": ("command line",),
        "train.max_steps=" + "9" * 5000: ("train.max_steps", "5000 digits"),
        "train.max_steps=" + "[" * 5000: ("nested too deeply",),
        "0=1": ("0", "unknown key"),
        "model.path=/dev/zero": ("model.path", "/dev/zero"),
        "--max-steps=3": ("--max-steps",),
        "--learning_rate": ("--learning_rate",),
    }
    cases = [
        Case(
            override[:60].encode("unicode_escape").decode(), GOOD, mentions, ("validate", "run.yaml", override)
        )
        for override, mentions in given.items()
    ]
    second = Case("the second run file", GOOD, ("key=value",), ("validate", "run.yaml", "other.yaml"))
    return numbered("override", [*cases, second])


def _fifo(folder: Path) -> None:
    os.mkfifo(folder / "run.yaml")


def _loop(folder: Path) -> None:
    (folder / "run.yaml").symlink_to("run.yaml")


def _runs() -> list[Case]:
    cases = [
        Case("a recipe misspelt", nothing, ("quickstart",), ("validate", "quickstrat")),
        Case("a file misspelt", GOOD, ("run.yaml",), ("validate", "runn.yaml")),
        Case("a folder", nothing, ("folder",), ("validate", ".")),
        Case("nothing", nothing, ("RUN",), ("validate",)),
        Case("an empty name", nothing, ("error",), ("validate", "")),
        Case("a FIFO", _fifo, ("run.yaml",), ("validate", "run.yaml")),
        Case("a loop of links", _loop, ("run.yaml",), ("validate", "run.yaml")),
        Case("zeroes without end", nothing, ("/dev/zero",), ("validate", "/dev/zero")),
        Case("a file that cannot be read", nothing, ("/proc/self/mem",), ("validate", "/proc/self/mem")),
        Case("a name of 5000 characters", nothing, ("too long",), ("validate", "r" * 5000)),
        Case("a name with colours", nothing, ("\\x1b[31m",), ("validate", "\x1b[31mrun.yaml")),
        Case("a name that is no UTF-8", nothing, ("\\udcff",), ("validate", "\udcff.yaml")),
        Case("below a file", GOOD, ("run.yaml/x",), ("validate", "run.yaml/x")),
        Case("a world of no rank", GOOD, ("--world-size",), ("validate", "run.yaml", "--world-size", "0")),
        Case("a world in words", GOOD, ("--world-size",), ("validate", "run.yaml", "--world-size", "two")),
        Case(
            "a world that does not divide",
            GOOD,
            ("2000 prompts",),
            ("validate", "run.yaml", "--world-size", "1000"),
        ),
        Case("a world beyond counting", GOOD, ("error",), ("validate", "run.yaml", "--world-size", "9" * 30)),
        Case("an unknown option", GOOD, ("--wrold-size",), ("validate", "run.yaml", "--wrold-size", "2")),
        Case("an unknown command", nothing, ("trian",), ("trian", "quickstart")),
        Case("training what is not there", nothing, ("nothing.yaml",), ("train", "nothing.yaml")),
        Case("training nothing", nothing, ("RUN",), ("train",)),
        Case("training with a mistake", GOOD, ("train.max_step",), ("train", "run.yaml", "train.max_step=1")),
        Case("a plan of no generation", GOOD, ("--generations",), ("plan", "run.yaml", "--generations", "0")),
        Case("a plan of a bad run", GOOD, ("train.max_step",), ("plan", "run.yaml", "train.max_step=1")),
        Case("a plan of an empty file", raw(""), ("is empty",), ("plan", "run.yaml")),
    ]
    return numbered("run", cases)


def _resumed() -> list[Case]:
    empty_run = raw("", "config.yaml")
    cases = [
        Case("a file", GOOD, ("--resume", "run.yaml"), ("train", "--resume", "run.yaml")),
        Case("an empty folder", nothing, ("--resume", "holds no run"), ("train", "--resume", ".")),
        Case("what is not there", nothing, ("--resume", "absent"), ("train", "--resume", "absent")),
        Case("auto without a run", nothing, ("--resume", "auto"), ("train", "--resume", "auto")),
        Case("an empty config", empty_run, ("config.yaml", "is empty"), ("train", "--resume", ".")),
        Case(
            "a config that is no YAML",
            raw("a: [", "config.yaml"),
            ("config.yaml", "YAML"),
            ("train", "--resume", "."),
        ),
        Case("nothing", GOOD, ("--resume",), ("train", "run.yaml", "--resume", "")),
        Case("a loop of links", _loop, ("run.yaml",), ("train", "--resume", "run.yaml")),
        Case("a name of 5000 characters", nothing, ("too long",), ("train", "--resume", "r" * 5000)),
    ]
    return numbered("resume", cases)


def _others() -> list[Case]:
    metrics = '{"step": 1, "time": 1, "metrics": {"loss": 1}}\n'
    with_metrics = raw(metrics, "metrics.jsonl")
    reports = {
        "of nothing": (nothing, "RUN_DIR"),
        "of empty metrics": (raw("", "metrics.jsonl"), "metrics.jsonl"),
        "of broken metrics": (raw("{}\n", "metrics.jsonl"), "metrics.jsonl:1"),
        "of metrics that are no text": (raw(b"\xff\xfe\0\0" * 9 + b"\n", "metrics.jsonl"), "metrics.jsonl:1"),
        "of metrics that are lists": (raw("[1]\n", "metrics.jsonl"), "metrics.jsonl:1"),
        "with a config that is no YAML": (together(with_metrics, raw("a: [", "config.yaml")), "config.yaml"),
        "with a config that is a list": (together(with_metrics, raw("[1]", "config.yaml")), "config.yaml"),
        "with a config that is no text": (together(with_metrics, raw(b"\xff", "config.yaml")), "config.yaml"),
        "with a summary that is no JSON": (together(with_metrics, raw("{", "summary.json")), "summary.json"),
        "with a summary that is a list": (together(with_metrics, raw("[1]", "summary.json")), "summary.json"),
    }
    cases = [
        *(
            Case(f"report {name}", start, (mention,), ("report", "."))
            for name, (start, mention) in reports.items()
        ),
        Case("report of what is not there", nothing, ("absent",), ("report", "absent")),
        Case("report of a file", GOOD, ("is a file",), ("report", "run.yaml")),
        Case("report into a folder", with_metrics, ("--output",), ("report", ".", "--output", ".")),
        Case("recipe misspelt", nothing, ("quickstart",), ("recipes", "copy", "quikstart")),
        Case("recipe into a file", GOOD, ("run.yaml",), ("recipes", "copy", "quickstart", "run.yaml")),
        Case(
            "recipe over what is there",
            raw("mine", "quickstart.yaml"),
            ("quickstart.yaml", "--force"),
            ("recipes", "copy", "quickstart"),
        ),
        Case("recipe below a file", GOOD, ("run.yaml",), ("recipes", "copy", "quickstart", "run.yaml/x")),
        Case("recipe with a path for a name", nothing, ("../x",), ("recipes", "copy", "../x")),
        Case(
            "recipe changed wrongly",
            nothing,
            ("train.max_setps",),
            ("validate", "quickstart", "train.max_setps=1"),
        ),
        Case("plugin to check that is not there", nothing, ("nowhere",), ("plugins", "check", "nowhere")),
        Case(
            "plugin to check with a bad parameter",
            nothing,
            ("clip_hihg",),
            ("plugins", "check", "dapo", "clip_hihg=1"),
        ),
        Case(
            "plugin to check with no value", nothing, ("clip_high",), ("plugins", "check", "dapo", "clip_high")
        ),
        Case("plugin to show that is not there", nothing, ("dapoo", "dapo"), ("plugins", "show", "dapoo")),
        Case(
            "plugins of an unknown kind", nothing, ("--kind", "losses"), ("plugins", "list", "--kind", "losses")
        ),
        Case(
            "lock of a bad run", GOOD, ("train.max_step",), ("plugins", "lock", "run.yaml", "train.max_step=1")
        ),
        Case("locks of what is not there", nothing, ("a.json",), ("plugins", "diff", "a.json", "b.json")),
        Case("locks that are no JSON", GOOD, ("run.yaml",), ("plugins", "diff", "run.yaml", "run.yaml")),
        Case("plugin with a bad name", nothing, ("9 lives",), ("plugins", "new", "9 lives", "--kind", "loss")),
        Case("plugin of an unknown kind", nothing, ("--kind",), ("plugins", "new", "mine", "--kind", "lose")),
        Case("server of nothing", nothing, ("absent.yaml",), ("serve", "absent.yaml")),
        Case("server at a port that is none", nothing, ("--port",), ("serve", "quickstart", "--port", "99999")),
    ]
    return numbered("command", cases)
