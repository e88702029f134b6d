"""Every bad input there is."""

from __future__ import annotations

from fuzz_case import Case
from fuzz_commands import command_cases
from fuzz_data import data_cases
from fuzz_models import model_cases
from fuzz_run_files import run_file_cases
from fuzz_schema import schema_cases


def all_cases() -> list[Case]:
    """Return all cases; those that the run file alone shows come first."""
    cases = [*schema_cases(), *run_file_cases(), *command_cases(), *data_cases(), *model_cases()]
    return sorted(cases, key=lambda case: case.opened)
