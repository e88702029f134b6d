"""No secret is shown, kept or sent elsewhere, and what is none stays as it is: by key, by form, in any text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel
from support.problems import refused
from support.run_checks import refused_quickstart

from grpox.checkpoint.faults import Fault
from grpox.cli.train import run_to_resume
from grpox.config import ComponentRef, HubConfig, ModelConfig, RewardRef, RunConfig
from grpox.errors import ConfigError, Problem, plain
from grpox.errors import redaction as module
from grpox.errors.redaction import MASK, masked_keys, names_a_secret, redact, redacted, remember_secrets
from grpox.errors.validation import fields_by_key
from grpox.plugins.discovery import discover
from grpox.plugins.registry import Registry
from grpox.runfile.load import load_run, resolve_config
from grpox.runfile.secrets import restore_secrets
from grpox.training.replay import replay

DRAWN = "q8Zt3vLw5Xc1Nb7Rk2Ym9Hd4Gs6Pj0Fa8Ue"
"""As a machine draws a secret."""
PREFIXES = (
    "hf_", "sk-", "sk-ant-api03-", "sk-proj-", "ghp_", "gho_", "github_pat_", "glpat-", "AIza", "Bearer ",
    "bearer ", "xapp-1-", "xai-", "r8_", "hvs.", "dckr_pat_", "fw_", "sq0atp-", "sl.B", "xoxb-", "xoxa-",
    "xoxp-", "xoxr-", "xoxs-", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.",
    "https://hooks.slack.com/services/T0/B0/", "https://discord.com/api/webhooks/123456789/",
)  # fmt: skip
KNOWN_FORMS = [
    *(f"{prefix}{DRAWN}" for prefix in PREFIXES),
    "AKIAIOSFODNN7EXAMPLE",
    f"dapi{'0123456789abcdef' * 2}",
    f"-----BEGIN RSA PRIVATE KEY-----\nMIIE{DRAWN}\n-----END RSA PRIVATE KEY-----",
    "Bearer xyz",
    "Basic bWU6aHVzaA==",
    "AGE-SECRET-KEY-1QQPZRY9X8GF2TVDW0S3JN54KHCE6MUA7L",
    f"SG.{DRAWN}.{DRAWN}",
    f"https://api.telegram.org/bot123456:{DRAWN}/sendMessage",
    f"-----BEGIN PGP PRIVATE KEY BLOCK-----\n{DRAWN}\n-----END PGP PRIVATE KEY BLOCK-----",
]
"""Secrets by themselves, whatever they are called."""

SECRET_KEYS = [
    *("token", "hf_token", "hfToken", "HFToken", "hub_token", "authToken", "accessTokens"),
    *("api_tokens", "api_key", "apiKey", "api-key", "api-keys", "API_KEYS", "APIKey", "apikey"),
    *("X-Api-Key", "OPENAI_API_KEY", "access_key", "aws_access_key_id", "secretAccessKey"),
    *("private_key", "privateKeys", "account_key", "ssh_key", "password", "passwords", "dbPassword"),
    *("passwd", "pwd", "passphrase", "db_pass", "PGPASSWORD", "secret", "secrets", "client_secret"),
    *("clientSecret", "client-secret", "secret_1", "secret_value", "credential", "credentials"),
    *("Authorization", "Proxy-Authorization", "bearer", "auth", "basic_auth", "jwt", "cookie"),
    *("Set-Cookie", "session_cookie", "sessionCookie", "dsn", "sentry.dsn", "connection_string"),
    *("connectionString", "conn_str", "db.password", "rewards[0].api_key", "keys.password.0"),
    *("api_keys[1]", "bot_token", "slack_webhook", "webhook_url", "gh_pat", "passwordHash", "groq_key"),
    *("apiKey2", "hfToken1", "privateKeyPem", "auth_header", "AuthorizationHeader", "cookie_header"),
    *("auths", "identitytoken", "passwordList", "credentials_json", "keystore_pass", "azure_devops_pat"),
    *("pat", "sas_url", "mnemonic", "seed_phrase"),
]  # fmt: skip
OTHER_KEYS = [
    *("eos_token", "pad_token", "additional_special_token", "think_token", "max_token"),
    *("decoder_start_token", "tokens", "max_tokens", "num_tokens", "max_new_tokens"),
    *("max_tokens_per_micro_batch", "max_turn_tokens", "stop_token_ids", "eos_token_id"),
    *("completion_tokens", "special_tokens", "token_level", "token-truncate", "token_file"),
    *("tokens_per_second", "tokenizer", "tokenizer_path", "detokenize", "token_type_ids", "key"),
    *("keys", "prompt_key", "answer_key", "keyword", "keywords", "public_key", "cache_key", "sort_key"),
    *("api_key_env", "secret_name", "password_file", "revision", "git_commit", "digest", "sha256"),
    *("run_id", "model", "name", "author", "authors", "passes", "pass_at_k", "bypass", "forward_pass"),
    *("compass", "secretary", "seed", "url", "base_url", "session_id", "connection", "connections"),
    *("monkey", "turkey", "hockey", "eot_token", "begin_of_turn_token", "padding_token", "fim_token"),
    *("eos_token_text", "pad_token_2", "stop_token_string", "token_list", "token_json"),
    *("pattern", "patience", "random_seed", "fw_layer_norm"),
]  # fmt: skip


@pytest.mark.parametrize("key", ["tokens", "hub_tokens", "judge.tokens", "apiTokens", "tokens.deep"])
@pytest.mark.parametrize("made", [lambda text: {"a": text}, lambda text: [text, text]])
def test_texts_below_tokens_are_masked(key: str, made: Any) -> None:
    config = {key: made("hush")}
    assert "hush" not in str(redacted(config))
    assert masked_keys(redacted(config))
    plain = {"tokens": {"longest": 5, "pad": "<pad>"}, "stop_tokens": made("x"), "keys": made("x")}
    assert redacted(plain) == plain


SECRET_TEXTS = [
    ("https://me:hush@host:5000/x", "https://me:***@host:5000/x"),
    ("refused by postgresql://me:h@sh@host/db: no", "refused by postgresql://me:***@host/db: no"),
    ("https://me:hu/sh@host/x", "https://me:***@host/x"),
    ("git+https://x:ghp_hush@github.com/a/b", "git+https://x:***@github.com/a/b"),
    ("git clone https://hush@github.com/a/b", "git clone https://***@github.com/a/b"),
    ("https://hush:x-oauth-basic@github.com/a", "https://***:x-oauth-basic@github.com/a"),
    ("https://:hush@host", "https://:***@host"),
    ("http://h1:8000,http://me:hush@h2:8000", "http://h1:8000,http://me:***@h2:8000"),
    ("https://host/?token=hush&step=3", "https://host/?token=***&step=3"),
    ("https://host/?key=hush", "https://host/?key=***"),
    ("https://x.blob.net/a?sv=2020&sig=hush%3D", "https://x.blob.net/a?sv=2020&sig=***"),
    ("postgresql://host/db?user=me&password=hush", "postgresql://host/db?user=me&password=***"),
    ("host=db user=me password=hush dbname=x", "host=db user=me password=*** dbname=x"),
    ("Server=db;Uid=me;Pwd=hush;", "Server=db;Uid=me;Pwd=***;"),
    ("AccountName=x;AccountKey=hush+/==;EndpointSuffix=y", "AccountName=x;AccountKey=***;EndpointSuffix=y"),
    ("OPENAI_API_KEY=hush python run.py", "OPENAI_API_KEY=*** python run.py"),
    ("serve --api-key hush --port 1", "serve --api-key *** --port 1"),
    ("error: rewards.0.api_key=hush: no", "error: rewards.0.api_key=***: no"),
    ("{'api_key': 'hush hush', 'n': 1}", "{'api_key': '***', 'n': 1}"),
    ('{"password": "hu\\"sh", "n": 1}', '{"password": "***", "n": 1}'),
    ('{"apiKey": 12345, "n": 1}', '{"apiKey": ***, "n": 1}'),
    ('{\\"token\\": \\"hush\\"}', '{\\"token\\": \\"***\\"}'),
    ("Config(secret='hush', n=1)", "Config(secret='***', n=1)"),
    ("api_key: h4shh4sh", "api_key: ***"),
    ("X-Api-Key: hush", "X-Api-Key: ***"),
    ("Authorization: Bearer hush", "Authorization: ***"),
    ("authorization: token hush", "authorization: ***"),
    ("http://me:hush@[::1]:8000/a", "http://me:***@[::1]:8000/a"),
    ("unexpected token: api_key=hush", "unexpected token: api_key=***"),
    ("{'api_keys': ['hush', 'hush'], 'n': 1}", "{'api_keys': ***, 'n': 1}"),
    ("credentials={'user': 'me', 'value': 'hush'}", "credentials=***"),
    ("{'Authorization': 'Basic hush'}", "{'Authorization': '***'}"),
    ("sent Cookie: session=hush; id=hush", "sent Cookie: ***"),
    ("Config(api_key=SecretStr('hush'), n=1)", "Config(api_key=SecretStr('***'), n=1)"),
    ("api_key=b'hush'", "api_key=b'***'"),
    ('token=Secret(str("hush"))', 'token=Secret(str("***"))'),
    ('Authorization: Digest username="me", response="hush"', "Authorization: ***"),
    ("Authorization: AWS4-HMAC-SHA256 Credential=me, Signature=hush", "Authorization: ***"),
    ("machine github.com login me password hush", "machine github.com login me password ***"),
]
OTHER_TEXTS = [
    *("token=(\\d+)", "api_key={key}", "password=<yours>", "token=${HF_TOKEN}", "--api-key $KEY"),
    *("http://host:5000/a@b", "http://host:8000", "sqlite:////data/mlflow.db", "me@host.org", "a: b"),
    *("git+ssh://git@github.com/a/b", "https://git@github.com/a/b", "hf://datasets/a/b@main/c.parquet"),
    *("loss at step 3: 0.5", "?tokens=3", "max_tokens=512", "eos_token='</s>'"),
    *('{"pad_token": "<pad>"}', "no token: set HF_TOKEN", "a bearer token is asked for"),
    *("Bearer token", "the ring bearer sang", "Basic arithmetic", "Basic training of models"),
    *("token: missing", "password: refused", "api_key=None", "rewards.0.api_key=... beside --resume"),
    *("9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",),
    *("2b0a3c5d7e9f1a2b3c4d5e6f708192a3b4c5d6e7", "Qwen/Qwen2.5-72B-Instruct"),
    *("/models/sk-2024-finetuned-llama3", "/models/hf_llama3", "hf_generator", "npm_config_registry"),
    *("task-specific-rewards-of-2024", "Basic ***rules***", "***important***", "run-20240131-a1b2c3d4e5f6"),
    *("tr-0123456789abcdef0123456789abcdef", "step=3 reward=0.5", "key=value"),
    *("the login page password field", "xapp-container-image", "hvs.plot_of_the_model"),
    *("api.telegram.org/bots", "token: tokenizer(x)", "SG.module.attribute", "discord.com/api/docs"),
]  # fmt: skip


@pytest.mark.parametrize("key", SECRET_KEYS)
def test_a_key_names_a_secret(key: str) -> None:
    assert names_a_secret(key)
    assert redacted({"a": [{key: "hush"}], "b": {key: 12345}}) == {"a": [{key: MASK}], "b": {key: MASK}}


@pytest.mark.parametrize("key", OTHER_KEYS)
def test_a_key_names_no_secret(key: str) -> None:
    assert not names_a_secret(key)
    config = {key: [1, 2], "b": {key: "a1b2c3d4e5"}}
    assert redacted(config) == config


@pytest.mark.parametrize("secret", KNOWN_FORMS)
def test_a_known_form_is_masked_wherever_it_stands(secret: str) -> None:
    for text in (secret, f"refused: {secret}, sorry", json.dumps({"note": secret})):
        shown = redact(text)
        assert shown != text
        assert DRAWN not in shown
        assert "hush" not in shown
        assert redact(shown) == shown
    assert masked_keys({"note": redacted(secret)}) == ["note"]


@pytest.mark.parametrize(("text", "shown"), SECRET_TEXTS)
def test_a_secret_in_a_text_is_masked(text: str, shown: str) -> None:
    assert redact(text) == shown
    assert redact(shown) == shown  # so that a record may be masked twice
    assert masked_keys({"note": shown}) == ["note"]


@pytest.mark.parametrize("text", OTHER_TEXTS)
def test_what_holds_no_secret_stays_as_it_is(text: str) -> None:
    assert redact(text) == text
    assert masked_keys({"stop": [text, MASK]}) == []


def test_values_of_secret_keys_are_masked_at_any_depth_and_others_are_not() -> None:
    config = {
        "rewards": [{"name": "judge", "api_key": "hush", "url": "https://me:hush@host"}],
        "hub": {"token": None, "private": True, "password": ""},
        "keys": {"password": ["hush", "hush"]},
        "credentials": {"user": "hush", "pin": 1234, "remember": True},
        "headers": [["Authorization", "hush"], ["Accept", "json"]],
        "env": [{"name": "API_KEY", "value": "hush"}, {"name": "HOME", "value": "/root"}],
        "arguments": ["--port", "1", "--api-key", "hush"],
        "http://me:hush@host": 3,
        "boundary_token": "<|b|>",
        "other_token": 7,
        "token": 7,
        "stop": ["token", "secret"],
        "vendor_key": DRAWN,
        "cache_key": "9f86d081884c7d659a2feaa0c55ad015",
    }
    expected = json.loads(json.dumps(config).replace("hush", MASK).replace(DRAWN, MASK))
    expected["credentials"]["pin"] = expected["token"] = MASK
    assert redacted(config) == expected
    assert masked_keys(redacted(config))[-1] == "vendor_key"
    assert redacted(redacted(config)) == redacted(config)


def test_nothing_of_the_core_and_the_built_in_plugins_is_called_as_a_secret_is() -> None:
    """Else a run could not be read back from its record."""
    models: list[type[BaseModel]] = [RunConfig, ComponentRef, RewardRef, HubConfig]
    registry = Registry(discover([]))
    for offer in registry.plugins.offers:
        if offer.distribution == "grpox" and (config := registry.config_model(offer)) is not None:
            models.append(config)
    assert len(models) > 20
    assert {key for model in models for key in _keys(model) if names_a_secret(key)} == set()


def _keys(model: type[BaseModel]) -> Iterator[str]:
    for key, field in fields_by_key(model).items():
        yield key
        for member in (field.annotation, *get_args(field.annotation)):
            if isinstance(member, type) and issubclass(member, BaseModel) and member is not model:
                yield from _keys(member)


def test_secrets_of_a_run_are_masked_in_whatever_text_they_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_known", set())
    monkeypatch.setenv("JUDGE_PASSWORD", "hushabye-baby")
    monkeypatch.setenv("PWD", "/home/somebody")
    remember_secrets({"rewards": [{"api_key": "correct horse", "pwd": "short"}], "train": {"seed": 12345678}})
    assert redact("refused: correct horse") == "refused: ***"
    assert redact("incorrect horses of hushabye-baby, short") == "incorrect horses of ***, short"
    remember_secrets({"token": 'it\'s "half" a/b\n'})
    escaped = ('it\'s "half" a/b', 'it\\\'s "half" a/b', 'it\'s \\"half\\" a/b', "it%27s%20%22half%22%20a%2Fb")
    for written in escaped:
        assert redact(f"refused: {written}, sorry") == "refused: ***, sorry"
    assert redact("in /home/somebody, seed 12345678") == "in /home/somebody, seed 12345678"
    # A record of the run must not depend on what else there is.
    assert redacted({"note": "correct horse"}) == {"note": "correct horse"}


def test_messages_hide_secrets_before_they_are_cut() -> None:
    problem = Problem("is refused", "rewards[0].apiKey", given="hush", allowed="a key that begins with k")
    assert "hush" not in str(ConfigError(problem))
    assert "a key that begins with k" in str(problem)
    address = f"http://me:{'hush' * 100}@host"
    assert plain(address) == "http://me:***@host"
    problems = refused_quickstart("hub={repo: a/b, apiKey: hush}", "train.max_steps={password: hush}")
    assert "hush" not in str(ConfigError(problems))


RUN = {
    "model": {"path": "m"},
    "data": {"path": "d.jsonl"},
    "rewards": [{"name": "exact", "api_key": "hush", "url": "http://me:hush@host", "n": 1}],
    "sampling": {"stop": ["***"]},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's, whose run file is run.yaml in the working directory."""
    monkeypatch.chdir(tmp_path)
    made = tmp_path / "runs" / "mine"
    made.mkdir(parents=True)
    (made / "config.yaml").write_text(yaml.safe_dump(redacted(RUN)))
    (made / "versions.json").write_text(json.dumps({"source": "run.yaml", "file": str(tmp_path / "run.yaml")}))
    return made


def _refused(folder: Path) -> dict[str, Problem]:
    """Why a run does not go on in `folder`, by key: nothing of what it names is there."""
    run, changes = run_to_resume(None, [], str(folder))
    return {problem.key: problem for problem in refused(load_run, run or "", changes)}


@pytest.mark.parametrize("where", ["run file", "environment", "command line"])
def test_a_resume_takes_its_secrets_from_where_they_are(
    folder: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = []
    if where == "run file":
        (folder.parents[1] / "run.yaml").write_text(yaml.safe_dump(RUN))
    elif where == "environment":
        monkeypatch.setenv("GRPOX_REWARDS_0_API_KEY", "hush")
        monkeypatch.setenv("GRPOX_REWARDS_0_URL", "http://me:hush@host")
    else:
        overrides = ["rewards.0.api_key=hush", "rewards.0.url=http://me:hush@host"]
    run, changes = run_to_resume(None, overrides, str(folder))
    taken: list[Any] = []
    monkeypatch.setattr("grpox.runfile.load.remember_secrets", taken.append)
    refused(load_run, run or "", changes)  # nothing of what it names is there
    assert taken[0]["rewards"] == RUN["rewards"]


def test_a_resume_takes_secrets_under_keys_that_are_no_dotted_names(folder: Path) -> None:
    keys = ("fs.azure.account.key", "x.api_key", "a=b", "it's", "")
    run = {**RUN, "rewards": [{"name": "exact", "headers": {key: {"token": "hush"} for key in keys}}]}
    (folder.parents[1] / "run.yaml").write_text(yaml.safe_dump(run))
    data = redacted(run)
    assert restore_secrets(data, folder) == []
    assert data == run


def test_a_resume_without_its_secrets_is_refused_by_the_name_of_each(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = _refused(folder)
    assert list(told) == ["rewards[0].api_key", "rewards[0].url"]
    assert "GRPOX_REWARDS_0_API_KEY" in str(told["rewards[0].api_key"])
    assert "rewards.0.url=..." in str(told["rewards[0].url"])
    other = {**RUN, "rewards": [{"name": "exact", "api_key": "hush", "url": "http://you:hush@elsewhere"}]}
    (folder.parents[1] / "run.yaml").write_text(yaml.safe_dump(other))  # it was changed since
    assert list(_refused(folder)) == ["rewards[0].url"]
    (folder.parents[1] / "run.yaml").unlink()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "run.yaml").write_text(yaml.safe_dump(RUN))  # a run file of the same name
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert list(_refused(folder)) == ["rewards[0].api_key", "rewards[0].url"]


def test_a_mask_is_no_value_of_a_replay_or_a_run_given_in_python(folder: Path) -> None:
    config = load_run("quickstart").config.model_dump(mode="json")
    config["loss"]["api_key"] = config["rewards"][0]["api_key"] = MASK
    fault = Fault(step=1, what="NaN", world_size=1, found=[], config=config)
    [problem] = refused(replay, folder / "faults" / "step-00000001", fault)
    assert problem.key == "loss.api_key"  # those alone of the parts that it runs
    given = RunConfig.model_validate({**RUN, "rewards": [{"name": "exact", "api_key": MASK}]})
    [problem] = refused(resolve_config, given, Path.cwd(), "python")
    assert problem.key == "rewards[0].api_key"
    assert ModelConfig(path="m", init={"token": MASK})  # as long as nobody runs it
