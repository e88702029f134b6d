"""A run that is full of secrets, fails and goes on: none of them is in what it leaves or prints."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from support.fixtures import GrpoxCommand

from grpox.runfile.recipe_files import copy_recipe


class Secrets(list[str]):
    """The secrets that a run is given, each of its own."""

    def draw(self, form: str = "{}") -> str:
        """One more, in a form such as ``Bearer {}``."""
        self.append(f"Zq{len(self):04d}xW7vLkT2nRb9cYsHfJ")
        return form.format(self[-1])


NAMED = (
    "token apiKey api_keys api-key Authorization bearer credentials password passwd pwd passphrase secret "
    "client_secret access_key secretAccessKey private_key privateKeys session_cookie cookie dsn "
    "connection_string authToken accessTokens basic_auth jwt"
)
FORMS = (
    "hf_{}", "sk-{}", "sk-ant-api03-{}", "ghp_{}", "github_pat_{}", "glpat-{}", "xoxb-{}", "AIza{}",
    "Bearer {}", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIi.{}",
    "-----BEGIN PRIVATE KEY-----\n{}\n-----END PRIVATE KEY-----",
    "http://me:{}@host:8000/v1", "https://{}@github.com/a/b", "https://host/v1?token={}&n=1",
    "https://host/v1?api_key={}", "serve --api-key {}", "host=db password={}", "{{'apiKey': '{}'}}",
)  # fmt: skip
REWARD = """
import hashlib
import json
from pathlib import Path

from pydantic import BaseModel


class Judge:
    class Config(BaseModel):
        options: dict
        by_form: list

    def __init__(self, config: Config) -> None:
        self.config = config
        told = json.dumps([config.options, config.by_form], sort_keys=True)
        Path("given.txt").write_text(hashlib.sha256(told.encode()).hexdigest())

    def __call__(self, completions: list, trainer_state, **columns: object) -> list[float]:
        if trainer_state.global_step and not Path("mended").exists():
            raise ValueError(f"401: {self.config.options['secret']} is refused, as is {self.config.by_form[0]}")
        return [float(len(completion) % 3) for completion in completions]
"""


def secret_keys(secrets: Secrets) -> dict[str, Any]:
    """Keys that are added to the run file of the quickstart."""
    draw = secrets.draw
    options = {key: draw() for key in NAMED.split()}
    nested = [
        {"headers": {"X-Api-Key": draw()}},
        {"name": "API_KEY", "value": draw()},
        {"pin": {"password": 1}},
    ]
    return {
        "model": {"init": {"token": draw("hf_{}")}, "chat_template_kwargs": {"hfToken": draw()}},
        "rewards": [
            {
                "path": "judge.py:Judge",
                "options": options | {"nested": nested},
                "by_form": [draw(form) for form in FORMS],
            }
        ],
        "deepspeed": {"settings": {"comet": {"enabled": False, "api_key": draw()}}},
        "tracking": {"mlflow": {"tags": {"note": draw("ghp_{}"), "judge_password": draw()}}},
    }


def contents(folder: Path) -> Iterator[tuple[Path, bytes]]:
    for path in folder.rglob("*"):
        if path.is_file() and path.suffix != ".safetensors":
            yield path, path.read_bytes()


def test_no_secret_of_a_run_is_in_what_it_leaves_and_a_resume_needs_none_again(
    grpox: GrpoxCommand, folder: Path
) -> None:
    copy_recipe("quickstart", folder)
    run, secrets = yaml.safe_load((folder / "quickstart.yaml").read_text()), Secrets()
    for section, given in secret_keys(secrets).items():
        run[section] = {**run.get(section, {}), **given} if isinstance(given, dict) else given
    short = {"max_steps": 2, "per_device_train_batch_size": 16, "num_generations": 4}
    run |= {"evaluation": None, "train": {**run["train"], **short}, "checkpoint": {"every": 1}}
    kept = folder / "kept"
    kept.mkdir()
    (kept / "run.yaml").write_text(yaml.safe_dump(run))
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    (folder / "judge.py").write_text(REWARD)
    told = []

    failed = grpox("train", "run.yaml", "output_dir=runs/mine", "--traceback")
    assert failed.returncode == 1, failed.stderr
    told += [failed.stdout, failed.stderr]
    assert "401: *** is refused, as is hf_***" in failed.stderr
    assert "401: *** is refused" in (folder / "runs/mine/failure.json").read_text()
    given = (folder / "given.txt").read_text()

    (folder / "run.yaml").unlink()
    (folder / "mended").touch()
    refused = grpox("train", "--resume", "runs/mine")
    told += [refused.stdout, refused.stderr]
    assert refused.returncode == 2
    assert "rewards[0].options.secret: pass this secret again: it is masked here" in refused.stderr
    assert "GRPOX_REWARDS_0_OPTIONS_SECRET" in refused.stderr

    (kept / "run.yaml").rename(folder / "run.yaml")
    (folder / "given.txt").unlink()
    resumed = grpox("train", "--resume", "runs/mine")
    assert resumed.returncode == 0, resumed.stderr
    told += [resumed.stdout, resumed.stderr]
    assert (folder / "given.txt").read_text() == given
    assert json.loads((folder / "runs/mine/versions.json").read_text())["source"] == "run.yaml"

    checked = grpox("validate", "run.yaml")
    told += [checked.stdout, checked.stderr]
    assert checked.returncode == 0
    (folder / "run.yaml").unlink()

    assert len(secrets) > 40
    left = list(contents(folder))
    names = {path.name for path, _ in left}
    assert {"config.yaml", "report.html", "README.md", "mlflow.db", "mlflow.json", "plugins.lock.json"} <= names
    for each in secrets:
        forms = (each.encode(), base64.b64encode(each.encode()))
        found = [path for path, held in left if any(form in held for form in forms)]
        assert found == []
        assert each not in "".join(told)
