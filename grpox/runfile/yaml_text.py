"""YAML that is written for `grpox.runfile.yaml_lines` to read back."""

from __future__ import annotations

import yaml

from grpox.runfile.yaml_lines import is_number


class Dumper(yaml.SafeDumper):
    """PyYAML's, with quotes around texts that YAML 1.2 would take for numbers, and YAML 1.1 not: ``1e-6``."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style='"' if is_number(value) else None)


Dumper.add_representer(str, _text)
