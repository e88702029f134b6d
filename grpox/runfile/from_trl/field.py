"""What became of a field of TRL's: the same, different, not needed, not supported."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any


class Verdict(Enum):
    """What a run file makes of something that TRL was given."""

    SAME = "same"
    DIFFERS = "differs"
    NOT_NEEDED = "not needed"
    UNSUPPORTED = "not supported"
    UNREAD = "not a literal"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class TrlField:
    """A field of TRL's and the key of a run file that answers to it."""

    verdict: Verdict
    key: str = ""
    """Dotted key of the run file, empty where there is none."""
    note: str = ""
    """What differs, why it is not needed, or what to do in its place."""
    default: Any = None
    """TRL's own, as a run file would write it."""
    copied: bool = False
    """Whether the value goes to `key` as it is, and TRL's default too where it is not ours."""
    inert: tuple[Any, ...] = ()
    """Values with which a field that is not supported does nothing, besides its default."""

    def does_nothing_at(self, value: Any) -> bool:
        """Whether TRL given `value` trains as if it had not been given it."""
        return any(value is other or (value == other and type(value) is type(other)) for other in self._off)

    @property
    def _off(self) -> tuple[Any, ...]:
        return (self.default, *self.inert)

    @property
    def told(self) -> str:
        """What differs, in words; of a field that means the same, nothing but that."""
        if self.verdict is Verdict.SAME:
            return self.note or "the same"
        return self.note if self.verdict is Verdict.DIFFERS else f"{self.verdict.value}: {self.note}"


def copied(key: str, default: Any = None, note: str = "") -> TrlField:
    """A field whose value is that of `key`."""
    return TrlField(Verdict.SAME, key, note, default, copied=True)


def same(key: str, default: Any = None, note: str = "") -> TrlField:
    """A field that means what `key` means, whose value is written in another way."""
    return TrlField(Verdict.SAME, key, note, default)


def differs(key: str, note: str, default: Any = None, copied: bool = False) -> TrlField:
    """A field that `key` answers to, but not in all."""
    return TrlField(Verdict.DIFFERS, key, note, default, copied)


def unneeded(note: str, default: Any = None) -> TrlField:
    """A field whose work grpox does without being told, or has no use for."""
    return TrlField(Verdict.NOT_NEEDED, "", note, default)


def unsupported(note: str, default: Any = None, key: str = "", inert: tuple[Any, ...] = ()) -> TrlField:
    """A field that a run file cannot express. `note` says what to do."""
    return TrlField(Verdict.UNSUPPORTED, key, note, default, inert=inert)
