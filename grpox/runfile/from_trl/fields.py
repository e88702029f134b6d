"""TRL's settings, from fields.yaml, and their outcome in a run file."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from grpox.runfile.yaml_lines import read_table


class Verdict(Enum):
    """Outcome of a TRL setting in a run file."""

    SAME = "same"
    DIFFERS = "differs"
    NOT_NEEDED = "not needed"
    UNSUPPORTED = "not supported"
    UNREAD = "not a literal"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class TrlField:
    """A TRL field and the corresponding key of a run file; fields.yaml explains them."""

    verdict: Verdict
    key: str = ""
    """Dotted key of the run file, empty if there is none."""
    note: str = ""
    """Remark: the difference, the reason why the field is not needed, or the remedy."""
    default: Any = None
    """TRL's default, as a run file would write it."""
    copied: bool = False
    inert: tuple[Any, ...] = ()
    of: str = ""
    needs: str = ""

    def judge(self, value: Any) -> tuple[Verdict, str]:
        """Return the outcome of the field with `value`."""
        off = (*self.inert, self.default) if self.verdict is Verdict.UNSUPPORTED else self.inert
        if any(value is other or (value == other and type(value) is type(other)) for other in off):
            return Verdict.NOT_NEEDED, "has no effect at this value"
        if self.verdict is Verdict.SAME:
            return self.verdict, self.key
        key = f"{self.key}: " if self.key and self.verdict is Verdict.DIFFERS else ""
        return self.verdict, f"{key}{self.note}"


def _fields(entries: dict[str, Any], prefix: str = "") -> dict[str, TrlField]:
    fields = {}
    for name, entry in entries.items():
        (form, about), *others = entry.items()
        what = "note" if form in ("not needed", "not supported") else "key"
        values = {"verdict": "same" if form == "copied" else form, what: about, **dict(others)}
        verdict = Verdict(values.pop("verdict"))
        fields[f"{prefix}{name}"] = TrlField(verdict, copied=form == "copied", **values)
    return fields


_TABLES = read_table("grpox.runfile.from_trl", "fields.yaml")

GRPO_FIELDS = _fields(_TABLES["grpo"])
TRAINER_FIELDS = _fields(_TABLES["training"])
LORA = "peft_config."
"""Prefix of the arguments of LoraConfig among the fields of GRPOConfig."""
FIELDS = GRPO_FIELDS | TRAINER_FIELDS | _fields(_TABLES["earlier"]) | _fields(_TABLES["script"])
FIELDS |= _fields(_TABLES["lora"], LORA)
"""Field of GRPOConfig, of the YAML file of `trl grpo` or of LoraConfig -> its counterpart."""
TRAINER_ARGUMENTS = _fields(_TABLES["trainer"])
"""Argument of GRPOTrainer -> its counterpart."""
POSITIONS = tuple(name for name in TRAINER_ARGUMENTS if name != "tokenizer")
"""Positional arguments of GRPOTrainer, in order."""
GENERATION_KWARGS: dict[str, str] = _TABLES["generation_kwargs"]
TRL_REWARDS: dict[str, dict[str, Any]] = _TABLES["rewards"]
VARIANTS: dict[str, dict[str, Any]] = _TABLES["variants"]
STATEMENTS: dict[str, Any] = _TABLES["statements"]


def parameters_of(*components: str) -> tuple[str, ...]:
    """Name the fields that are parameters of a component or section."""
    return tuple(name for name, field in FIELDS.items() if field.of in components)


def note_of(name: str) -> str:
    """Return the remark on a TRL name; empty if there is none."""
    field = FIELDS.get(name) or TRAINER_ARGUMENTS.get(name)
    return field.note if field is not None else ""


def key_of(name: str) -> str:
    """Return grpox's key for a TRL name, also of GRPOTrainer's arguments; empty if there is none."""
    field = FIELDS.get(name) or TRAINER_ARGUMENTS.get(name)
    return field.key if field is not None else ""
