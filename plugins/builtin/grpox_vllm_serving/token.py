"""The secret that a server and its runs share: from the environment or a file, never from a command line."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from grpox.errors import ConfigError, Problem

VARIABLE = "GRPOX_SERVER_TOKEN"
SHORTEST = 16
"""Characters that a token has at least: it guards routes that replace a model's weights."""
LONGEST = 16 << 10
"""Characters that a token has at most: the servers refuse longer headers."""


def default_file() -> Path:
    """Where a server leaves its token for runs of the same user on the same machine."""
    home = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(home).expanduser() / "grpox" / "server-token"


def read_token(file: str | None, key: str) -> str:
    """The token: that of `file` where one is named, else of the environment, else of the default file.

    Args:
        key: what names `file`, for messages: a key of the run file or an option.

    Raises:
        ConfigError: there is none, others may read the file, or it is too short or cannot be sent.
    """
    if file is None and VARIABLE in os.environ:
        return _checked(os.environ[VARIABLE], VARIABLE)
    path = Path(file).expanduser() if file is not None else default_file()
    try:
        mode, text = path.stat().st_mode, path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        what = f"no token for the vLLM server: {' '.join(str(error).split())}"
        allowed = f"a file that holds the servers' token, or the token in {VARIABLE}"
        raise ConfigError(Problem(what, key, given=str(path), allowed=allowed)) from error
    if stat.S_IMODE(mode) & 0o077:
        what = "the token can be read by other users"
        raise ConfigError(Problem(what, key, given=str(path), allowed=f"chmod 600 {path}"))
    return _checked(text, str(path))


def read_or_make_token(file: str | None) -> str:
    """As `read_token`, but the default file is written with a new token if there is none."""
    path = default_file()
    if file is None and VARIABLE not in os.environ:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as new:
                new.write(secrets.token_urlsafe(32) + "\n")
        except FileExistsError:  # of an earlier server
            pass
        except OSError as error:
            what = f"a token for the vLLM server cannot be kept: {error.strerror or error}"
            allowed = f"--token-file, or the token in {VARIABLE}"
            raise ConfigError(Problem(what, "--token-file", given=str(path), allowed=allowed)) from error
    return read_token(file, "--token-file")


def _checked(text: str, where: str) -> str:
    token = text.strip()
    fits = SHORTEST <= len(token) <= LONGEST
    if not fits or not token.isascii() or not token.isprintable() or " " in token:
        what = f"no usable token for the vLLM server: it has {len(token)} characters"
        allowed = f"at least {SHORTEST} printable ASCII characters without a blank, at most {LONGEST:,}"
        raise ConfigError(Problem(what, where, allowed=allowed))
    return token
