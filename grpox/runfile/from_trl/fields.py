"""Names that TRL has for settings: the fields of fields.yaml, and what becomes of each in a run file."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from grpox.runfile.yaml_lines import read_table


class Verdict(Enum):
    """Outcome, in a run file, of something that TRL was given."""

    SAME = "same"
    DIFFERS = "differs"
    NOT_NEEDED = "not needed"
    UNSUPPORTED = "not supported"
    UNREAD = "not a literal"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class TrlField:
    """A field of TRL's and the key of a run file that answers to it, as fields.yaml explains them."""

    verdict: Verdict
    key: str = ""
    """Dotted key of the run file, empty where there is none."""
    note: str = ""
    """Text: what differs, why it is not needed, or what to do in its place."""
    default: Any = None
    """TRL's own, as a run file would write it."""
    copied: bool = False
    inert: tuple[Any, ...] = ()
    of: str = ""
    needs: str = ""

    def judge(self, value: Any) -> tuple[Verdict, str]:
        """Say what becomes of the field, given `value`."""
        off = (*self.inert, self.default) if self.verdict is Verdict.UNSUPPORTED else self.inert
        if any(value is other or (value == other and type(value) is type(other)) for other in off):
            return Verdict.NOT_NEEDED, "does nothing at this value"
        if self.verdict is Verdict.SAME:
            return self.verdict, self.key
        key = f"{self.key}: " if self.key and self.verdict is Verdict.DIFFERS else ""
        return self.verdict, f"{key}{self.note}"


def _fields(entries: dict[str, Any], prefix: str = "") -> dict[str, TrlField]:
    fields = {}
    for name, entry in entries.items():
        (form, about), *others = entry.items()
        verdict = Verdict.SAME if form == "copied" else Verdict(form)
        what = "note" if verdict in (Verdict.NOT_NEEDED, Verdict.UNSUPPORTED) else "key"
        values = {what: about, "copied": form == "copied", **dict(others)}
        fields[f"{prefix}{name}"] = TrlField(verdict, **values)
    return fields


_TABLES = read_table("grpox.runfile.from_trl", "fields.yaml")

GRPO_FIELDS = _fields(_TABLES["grpo"])
TRAINER_FIELDS = _fields(_TABLES["training"])
LORA = "peft_config."
"""Stands before arguments of LoraConfig, which are fields like those of GRPOConfig then."""
FIELDS = GRPO_FIELDS | TRAINER_FIELDS | _fields(_TABLES["script"]) | _fields(_TABLES["lora"], LORA)
"""Each field of GRPOConfig, of the YAML file of `trl grpo` and of LoraConfig, with what answers to it."""
TRAINER_ARGUMENTS = _fields(_TABLES["trainer"])
"""Argument of GRPOTrainer -> what answers to it."""
POSITIONS = tuple(name for name in TRAINER_ARGUMENTS if name != "tokenizer")
"""Arguments of GRPOTrainer that may be given without their names, in order."""
GENERATION_KWARGS: dict[str, str] = _TABLES["generation_kwargs"]
TRL_REWARDS: dict[str, dict[str, Any]] = _TABLES["rewards"]


def parameters_of(*components: str) -> tuple[str, ...]:
    """Name the fields that are parameters of a component or section."""
    return tuple(name for name, field in FIELDS.items() if field.of in components)


def key_of(name: str) -> str:
    """Our key for a name of TRL's, empty where there is none."""
    return FIELDS[name].key if name in FIELDS else ""
