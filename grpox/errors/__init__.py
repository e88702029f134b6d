"""Errors for users: cause, key and remedy in plain words, without secrets.

Each exception has a short message and an exit code. A `Problem` is one mistake: its key, the given value and
the allowed values. `validation` turns pydantic's errors into problems. `redaction` masks secrets in configs
and in text, by the names of their keys and by their form. `formatting` writes numbers and lists. The package
imports neither pydantic nor torch.
"""

from __future__ import annotations

import difflib
import re
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from grpox.errors.redaction import redact as redact
from grpox.errors.redaction import redacted as redacted


class GrpoxError(Exception):
    """An error whose message is meant for the user. The command line prints it and exits with `exit_code`."""

    exit_code = 1


WHAT = 700
"""Number of characters of `Problem.what` that are shown."""
TEXT = 2000
"""Number of characters of a foreign exception's text that are shown or saved."""
TRACE = 50_000
"""Number of characters of a traceback that are shown or saved."""
ALLOWED = 1000
"""Number of characters of `Problem.allowed` that are shown: some lists of names are long."""


INVISIBLE = re.compile(
    r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]|\r(?!\n)"
)
"""Characters that a terminal obeys, or that change the direction of text; tabs and line ends stay."""


def visible(text: str) -> str:
    """Escape the `INVISIBLE` characters of text from outside, for a terminal or a log."""
    return INVISIBLE.sub(lambda match: escaped(match[0]), text)


def escaped(text: str) -> str:
    """Escape all that cannot be printed, line ends included."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def plain(text: str, longest: int = 300) -> str:
    """Return `text` without secrets, `escaped`, cut in its middle to at most `longest` characters."""
    return _cut(escaped(shorten(text, longest) if len(text) > longest else redact(text)), longest)


def text_of(error: BaseException) -> str:
    """Return an exception's text, cut to `TEXT` characters; if `str` fails on it, the reason."""
    try:
        return shorten(str(error), TEXT)
    except BaseException as failed:  # noqa: BLE001 - a foreign class may raise anything here
        return f"its message cannot be read: {type(failed).__name__}"


def brief(value: object, longest: int = 60) -> str:
    """Return a foreign value as Python shows it, cut; its type if that fails: a huge number, a deep list."""
    try:
        return shorten(repr(value), longest)
    except Exception:  # noqa: BLE001 - a foreign class may raise anything here
        return f"a {type(value).__name__} that cannot be shown"


def describe(error: BaseException) -> str:
    """Return an exception in one line: its type, message and notes, cut to `TEXT` characters."""
    notes = vars(error).get("__notes__")  # of `add_note`; a foreign class may keep anything under that name
    texts = [f"({note})" for note in notes if isinstance(note, str)] if isinstance(notes, list) else []
    message = " ".join(" ".join([text_of(error), *texts]).split())
    return shorten(f"{type(error).__name__}: {message}".removesuffix(": "), TEXT)


def traceback_of(error: BaseException) -> str:
    """Return the traceback as Python prints it, cut to `TRACE` characters, and each text in it to `TEXT`."""
    try:
        return shorten("".join(shorten(part, TEXT) for part in traceback.format_exception(error)), TRACE)
    except BaseException:  # noqa: BLE001 - a foreign class may raise anything here
        return f"{describe(error)}\n"


def chain(error: BaseException, with_contexts: bool = False) -> Iterator[BaseException]:
    """Yield `error` and its causes, each once, because `raise error from error` makes a ring.

    Args:
        with_contexts: after an error without a cause, continue with the error that was being handled.
    """
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        yield following
        seen.add(id(following))
        following = following.__cause__ or (following.__context__ if with_contexts else None)


def shorten(text: str, longest: int) -> str:
    """Return `text`, cut in its middle to at most `longest` characters, with no part of a secret at the cut."""
    if len(text) <= longest:
        return text
    # Only the part that may be shown is searched: a million characters would take a second.
    return _cut(redact(_cut(text, 2 * longest)), longest)


def left_by_rich(error: BaseException) -> bool:
    """Return True for the SystemExit that rich raises when the reader has closed its output."""
    return isinstance(error, SystemExit) and isinstance(error.__context__, BrokenPipeError)


def _cut(text: str, longest: int) -> str:
    end = longest // 4
    return text if len(text) <= longest else f"{text[: longest - end - 3]}...{text[-end:]}"


@dataclass(frozen=True)
class Problem:
    """One mistake in the user's input."""

    what: str
    """The mistake, in one line."""
    key: str = ""
    """Dotted key, for example ``loss.clip_high``."""
    where: str = ""
    """``run.yaml:12``, or ``command line``."""
    given: str = ""
    allowed: str = ""
    nearest: str = ""
    """Nearest valid name, if the given name looks like a typo."""

    def __str__(self) -> str:
        parts = (plain(self.where), plain(self.key), plain(self.what, WHAT))
        head = ": ".join(part for part in parts if part)
        rows = (
            ("given", plain(redacted(self.given, self.key))),
            ("did you mean", plain(self.nearest)),
            ("allowed", plain(self.allowed, ALLOWED)),
        )
        return "\n".join([head, *(f"    {label:<13} {text}" for label, text in rows if text)])


class ConfigError(GrpoxError):
    """The run file, an override or a component is wrong; the message lists every problem.

    Args:
        problems: the problems; or the line of a single problem, followed by the other fields of `Problem`.
    """

    exit_code = 2

    def __init__(
        self,
        problems: Problem | Sequence[Problem] | str,
        key: str = "",
        where: str = "",
        given: str = "",
        allowed: str = "",
        nearest: str = "",
    ) -> None:
        if isinstance(problems, str):
            problems = Problem(problems, key, where, given, allowed, nearest)
        self.problems = [problems] if isinstance(problems, Problem) else list(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class RunFailed(GrpoxError):
    """The run itself failed: a reward raised, a generator died, a loss became NaN."""


class RankLost(RunFailed):
    """Another rank ended, or did not answer in time."""


class RunClosed(GrpoxError):
    """The caller ended a run before its last step: `grpox.Run.close`."""


def nearest(name: str, candidates: Iterable[str]) -> str:
    """Return the candidate that `name` probably means, or an empty string if none is near.

    Initials come before spelling, which would find ``lora`` for ``lr``, and the other parts of names after it.
    """
    known = list(candidates)
    return _of_initials(name, known) or nearest_spelling(name, known) or nearest_whole(name, known)


def nearest_whole(name: str, candidates: Iterable[str]) -> str:
    """Return the shortest candidate of which `name` is a part, or an empty string.

    It is one whose initials are `name` (``lr`` of learning_rate); else which begins with it; else some of whose
    words it is (``kl`` of max_kl).
    """
    known, given = {each: _words(each) for each in candidates}, _words(name)
    begins = [each for each, words in known.items() if words.startswith(given)]
    fitting = begins or [each for each, words in known.items() if f"_{given}_" in f"_{words}_"]
    return _of_initials(name, list(known)) or min(fitting if len(given) > 1 else [], key=len, default="")


def nearest_spelling(name: str, candidates: Iterable[str]) -> str:
    """Return the candidate that is spelt most like `name`, or an empty string if none is near."""
    matches = difflib.get_close_matches(name, list(candidates), n=1, cutoff=0.6)
    return matches[0] if matches else ""


def _of_initials(name: str, candidates: Sequence[str]) -> str:
    """Return the shortest candidate whose initials are `name`; a single letter would be those of too many."""
    initials = {each: "".join(word[0] for word in _words(each).split("_") if word) for each in candidates}
    given = _words(name).replace("_", "")
    return min((each for each in candidates if initials[each] == given and len(given) > 1), key=len, default="")


def _words(name: str) -> str:
    """Join the words of a name: ``The final-answer`` -> ``the_final_answer``."""
    return "_".join(re.findall(r"[^\W_]+", name.lower()))


def join(key: str, part: str | int) -> str:
    """Return the dotted key of `part` within `key`: ``train.beta``, ``rewards[0]``."""
    if isinstance(part, int):
        return f"{key}[{part}]"
    return f"{key}.{part}" if key else part
