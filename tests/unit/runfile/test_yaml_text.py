"""Written YAML reads back unchanged, for any text."""

from __future__ import annotations

import pytest
import yaml

from grpox.config import RunConfig
from grpox.observing.record import config_text
from grpox.runfile.yaml_lines import Dumper, read_yaml


@pytest.mark.parametrize(
    "text", ["1e-6", "0o17", ".5e3", "12", "0x1f", "1_000", "true", "null", "~", "", "+1."]
)
def test_a_text_that_looks_like_something_else_stays_a_text(text: str) -> None:
    written = yaml.dump({"key": text}, Dumper=Dumper)
    assert read_yaml(written, "f").data == {"key": text}


def test_the_recorded_config_reads_back_with_such_a_name() -> None:
    config = RunConfig.model_validate(
        {
            "model": {"path": "m"},
            "data": {"path": "d.jsonl"},
            "rewards": ["math"],
            "tracking": {"mlflow": {"run_name": "1e-6"}},
        }
    )
    read = read_yaml(config_text(config), "config.yaml").data
    assert read["tracking"]["mlflow"]["run_name"] == "1e-6"
    assert RunConfig.model_validate(read) == config
