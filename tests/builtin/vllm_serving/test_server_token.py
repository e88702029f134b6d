"""The token of vLLM servers: where it comes from, and whom the guard lets past."""

import asyncio
import stat

import pytest
from support.problems import problem_of

from grpox_vllm_serving.protocol import TOKEN_VARIABLE, TokenGuard, default_file, read_or_make_token, read_token

TOKEN = "0123456789abcdef"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def private(path, text):
    path.write_text(text)
    path.chmod(0o600)
    return str(path)


def test_a_token_is_made_once_for_this_user_and_a_file_or_the_environment_comes_before_it(
    tmp_path, monkeypatch
):
    made = read_or_make_token(None)
    assert len(made) >= 32
    assert read_or_make_token(None) == read_token(None, "key") == made
    assert stat.S_IMODE(default_file().stat().st_mode) == 0o600
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    assert read_token(None, "key") == read_or_make_token(None) == TOKEN
    assert read_token(private(tmp_path / "own", "another-token-0123\n"), "key") == "another-token-0123"


@pytest.mark.parametrize("home", ["/dev/null", "/dev/null/below", "/proc/here"])
def test_a_token_that_cannot_be_saved_is_refused_with_the_alternatives(home, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", home)
    problem = problem_of(read_or_make_token, None)
    assert (problem.key, problem.given) == ("--token-file", f"{home}/grpox/server-token")
    assert TOKEN_VARIABLE in str(problem)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "short",
        "with a blank 0123456789",
        "0123456789abcdefé",
        "0123456789\x01abcdef",
        pytest.param("x" * 16385, id="long"),
    ],
)
def test_a_file_without_a_token_is_refused_without_showing_it(tmp_path, text):
    problem = problem_of(read_token, private(tmp_path / "own", text), "key")
    assert f"it has {len(text)} characters" in str(problem)
    assert "16 to 16,384 printable ASCII characters" in str(problem)
    assert not text or text not in str(problem)


def test_a_missing_file_and_one_that_others_read_are_refused(tmp_path):
    missing = problem_of(read_token, str(tmp_path / "missing"), "generator.token_file")
    assert (missing.key, missing.what.startswith("no token")) == ("generator.token_file", True)
    path = private(tmp_path / "own", TOKEN)
    (tmp_path / "own").chmod(0o640)
    assert "chmod 600" in str(problem_of(read_token, path, "key"))


def ask(monkeypatch, path="/x", method="GET", kind="http", headers=()):
    """Return the answer of a guarded application: "passed", a status, or the code that closed a websocket."""
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    sent = []

    async def app(scope, receive, send):
        sent.append("passed")

    async def send(message):
        sent.append(message.get("status") or message.get("code") or message["type"])

    scope = {"type": kind, "path": path, "method": method, "headers": list(headers)}
    asyncio.run(TokenGuard(app)(scope, None, send))
    return sent[0]


def bearer(text):
    return (b"authorization", text.encode())


RIGHT = bearer(f"Bearer {TOKEN}")


def test_the_guard_lets_the_token_past(monkeypatch):
    for scope in ({"headers": [RIGHT]}, {"headers": [RIGHT], "kind": "websocket"}, {"kind": "lifespan"}):
        assert ask(monkeypatch, **scope) == "passed"
    assert ask(monkeypatch, path="/health") == "passed"


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [bearer(TOKEN)],
        [bearer(f"Bearer {TOKEN}x")],
        [bearer(f"bearer {TOKEN}")],
        [bearer("Bearer ")],
        [RIGHT, bearer("Bearer other")],
    ],
)
def test_the_guard_stops_everything_else(monkeypatch, headers):
    assert ask(monkeypatch, headers=headers) == 401
    assert ask(monkeypatch, kind="websocket", headers=headers) == 1008


def test_nothing_but_health_is_open(monkeypatch):
    for path in ("/health/", "//health", "/healthz", "/HEALTH", "/health/../collective_rpc", ""):
        assert ask(monkeypatch, path=path) == 401
    assert ask(monkeypatch, path="/health", method="POST") == 401


def test_headers_of_16_kib_are_accepted_and_longer_ones_refused(monkeypatch):
    others = [(b"host", b"127.0.0.1:8000"), (b"accept-encoding", b"gzip, deflate"), RIGHT]
    assert ask(monkeypatch, headers=[*others, (b"cookie", b"x" * (16 << 10))]) == "passed"
    assert ask(monkeypatch, headers=[*others, *[(b"cookie", b"x" * (1 << 10))] * 16]) == "passed"
    assert ask(monkeypatch, headers=[*others, (b"cookie", b"x" * (18 << 10))]) == 431
    assert ask(monkeypatch, headers=[(b"x", b"x")] * 10_000) == 431
    assert ask(monkeypatch, path="/health", headers=[(b"cookie", b"x" * (1 << 20))]) == 431
