"""Bad command lines: overrides, runs, ranks, and what the other commands are given."""

from __future__ import annotations

import os
from pathlib import Path

from fuzz_case import RUN, Case, case, nothing, numbered, raw, run_file

GOOD = run_file(RUN)


def command_cases() -> list[Case]:
    """All of them; each has a name of its own."""
    return [*_overrides(), *_runs(), *_others()]


def _overrides() -> list[Case]:
    given: dict[str, tuple[str, ...]] = {
        "train.max_steps": ("key=value", "train.max_steps"),
        "=5": ("needs a key", "=5"),
        "a..b=1": ("needs a key", "a..b=1"),
        "train.max_steps=": ("train.max_steps",),
        "rewards.99.weight=1": ("rewards[99]", "from 0 to"),
        "0=1": ("0", "unknown key"),
        "rewards.-1.weight=1": ("rewards", "-1"),
        "output_dir.x.y=1": ("output_dir", "no keys can be below"),
        "loss.clip_hihg=0.3": ("loss.clip_hihg", "clip_high"),
        "train={max_steps: 1": ("train", "command line"),
        "train=5": ("train", "command line"),
        "train.max_steps=!!python/object:os.system": ("train.max_steps",),
        "train.max_steps=*x": ("train.max_steps", "x"),
        "train.learning_rate=1e999": ("train.learning_rate", "too large"),
        "train.seed=99999999999999999999999999": ("train.seed",),
        "loss=\udcff": ("loss",),
        "\x1b[31mkey=1": ("\\x1b[31mkey",),
        "train." + "x." * 3000 + "y=1": ("command line",),
        "train.max_steps=" + "9" * 5000: ("train.max_steps", "5000 digits"),
        "train.max_steps=" + "[" * 5000: ("nested too deeply",),
        "--max-steps=3": ("--max-steps",),
    }
    cases = [
        case(ascii(override)[1:-1][:60], GOOD, ("validate", "run.yaml", override), *mentions)
        for override, mentions in given.items()
    ]
    second = case("the second run file", GOOD, "validate run.yaml other.yaml", "key=value")
    return numbered("override", [*cases, second])


def _fifo(folder: Path) -> None:
    os.mkfifo(folder / "run.yaml")


def _loop(folder: Path) -> None:
    (folder / "run.yaml").symlink_to("run.yaml")


def _runs() -> list[Case]:
    cases = [
        case("a recipe misspelt", nothing, "validate quickstrat", "quickstart"),
        case("a file misspelt", GOOD, "validate runn.yaml", "run.yaml"),
        case("a folder", nothing, "validate .", "folder"),
        case("nothing", nothing, "validate", "RUN"),
        case("a FIFO", _fifo, "validate run.yaml", "run.yaml"),
        case("a loop of links", _loop, "validate run.yaml", "run.yaml"),
        case("zeroes without end", nothing, "validate /dev/zero", "/dev/zero"),
        case("a name of 5000 characters", nothing, f"validate {'r' * 5000}", "too long"),
        case("a name that is no UTF-8", nothing, "validate \udcff.yaml", "\\udcff"),
        case("a world of no rank", GOOD, "validate run.yaml --world-size 0", "--world-size"),
        case("a world that does not divide", GOOD, "validate run.yaml --world-size 1000", "2000 prompts"),
        case("an unknown option", GOOD, "validate run.yaml --wrold-size 2", "--wrold-size"),
        case("training what is not there", nothing, "train nothing.yaml", "nothing.yaml"),
        case("a plan of no generation", GOOD, "plan run.yaml --generations 0", "--generations"),
    ]
    empty_run = raw("", "config.yaml")
    resumed = [
        case("a file", GOOD, "train --resume run.yaml", "--resume", "run.yaml"),
        case("an empty folder", nothing, "train --resume .", "--resume", "holds no run"),
        case("what is not there", nothing, "train --resume absent", "--resume", "absent"),
        case("auto without a run", nothing, "train --resume auto", "--resume", "auto"),
        case("an empty config", empty_run, "train --resume .", "config.yaml", "is empty"),
        case("nothing", GOOD, ("train", "run.yaml", "--resume", ""), "--resume"),
        case("a loop of links", _loop, "train --resume run.yaml", "run.yaml"),
    ]
    return [*numbered("run", cases), *numbered("resume", resumed)]


def _others() -> list[Case]:
    good = '{"step": 1, "time": 1, "metrics": {"loss": 1}}\n'
    bad = {"broken": "{}\n", "that are no text": b"\xff\xfe\0\0" * 9 + b"\n", "of lists": "[1]\n"}
    cases = [
        *(
            case(f"report of metrics {name}", raw(text, "metrics.jsonl"), "report .", "metrics.jsonl", "line 1")
            for name, text in bad.items()
        ),
        case("report of nothing", nothing, "report .", "RUN_DIR"),
        case("report of what is not there", nothing, "report absent", "absent"),
        case("report of a file", GOOD, "report run.yaml", "is a file"),
        case("report into a folder", raw(good, "metrics.jsonl"), "report . --output .", "--output"),
        case("recipe over a file", raw("", "quickstart.yaml"), "recipes copy quickstart", "--force"),
        case("recipe with a path for a name", nothing, "recipes copy ../x", "../x"),
        case("plugin to check that is not there", nothing, "plugins check nowhere", "nowhere"),
        case("plugin to check with a bad parameter", nothing, "plugins check dapo clip_hihg=1", "clip_hihg"),
        case("plugin to show that is not there", nothing, "plugins show dapoo", "dapoo", "dapo"),
        case("lock of a bad run", GOOD, "plugins lock run.yaml train.max_step=1", "train.max_step"),
        case("locks of what is not there", nothing, "plugins diff a.json b.json", "a.json"),
        case("locks that are no JSON", GOOD, "plugins diff run.yaml run.yaml", "run.yaml"),
        case("plugin with a bad name", nothing, ("plugins", "new", "9 lives", "--kind", "loss"), "9 lives"),
        case("server at a port that is none", nothing, "serve quickstart --port 99999", "--port"),
    ]
    return numbered("command", cases)
