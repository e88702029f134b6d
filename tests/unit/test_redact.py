"""No secret is shown or sent elsewhere, and what is none stays as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpox.cli.resume import run_to_resume
from grpox.errors import ConfigError
from grpox.redact import names_a_secret, redact, redacted


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://me:hush@host:5000/x", "https://me:***@host:5000/x"),
        ("refused by postgresql://me:h@sh@host/db: no", "refused by postgresql://me:***@host/db: no"),
        ("git+https://x:ghp_hush@github.com/a/b", "git+https://x:***@github.com/a/b"),
        ("https://:hush@host", "https://:***@host"),
        ("https://host/?token=hush&step=3", "https://host/?token=***&step=3"),
        ("postgresql://host/db?user=me&password=hush", "postgresql://host/db?user=me&password=***"),
        ("http://a:hush@b and http://c:hush@d", "http://a:***@b and http://c:***@d"),
    ],
)
def test_a_secret_in_an_address_is_masked(text: str, shown: str) -> None:
    assert redact(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "http://host:5000/a@b",
        "sqlite:////data/mlflow.db",
        "me@host.org",
        "a: b",
        "loss at step 3: 0.5",
        "?tokens=3",
    ],
)
def test_what_holds_no_secret_stays_as_it_is(text: str) -> None:
    assert redact(text) == text


@pytest.mark.parametrize(
    "key", ["token", "hf_token", "api_key", "db.password", "OPENAI_API_KEY", "client-secret"]
)
def test_a_key_names_a_secret(key: str) -> None:
    assert names_a_secret(key)


@pytest.mark.parametrize(
    "key",
    ["eos_token", "pad_token", "max_tokens", "stop_token_ids", "tokenizer", "key", "token_file", "num_tokens"],
)
def test_a_key_names_no_secret(key: str) -> None:
    assert not names_a_secret(key)


def test_values_of_secret_keys_are_masked_at_any_depth_and_others_are_not() -> None:
    config = {
        "rewards": [{"name": "judge", "api_key": "hush", "url": "https://me:hush@host"}],
        "hub": {"token": None, "private": True},
        "train": {"seed": 0},
        "keys": {"password": ["hush", "hush"]},
    }
    assert redacted(config) == {
        "rewards": [{"name": "judge", "api_key": "***", "url": "https://me:***@host"}],
        "hub": {"token": None, "private": True},
        "train": {"seed": 0},
        "keys": {"password": ["***", "***"]},
    }


def test_a_run_resumes_with_its_secrets_given_again(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("rewards:\n- {name: judge, api_key: '***'}\n")
    with pytest.raises(ConfigError, match="no secret is kept in a run's folder") as asked:
        run_to_resume(None, [], str(tmp_path))
    assert asked.value.problems[0].key == "rewards.0.api_key"
    run, changes = run_to_resume(None, ["rewards.0.api_key=hush"], str(tmp_path))
    assert (run, changes[0]) == (str(tmp_path / "config.yaml"), "rewards.0.api_key=hush")
