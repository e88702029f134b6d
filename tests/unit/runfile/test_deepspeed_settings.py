"""`deepspeed.settings` and offload: what is refused before DeepSpeed is imported, and what it is given."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.config import _REMOVED_TOP_LEVEL_CONFIG_KEYS
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from support.problems import refused

from grpox.config import DeepSpeedConfig, RunConfig
from grpox.errors import ConfigError
from grpox.policy.deepspeed_config import check_deepspeed, deepspeed_config, reference_config
from grpox.runfile.deepspeed_settings import deepspeed_keys, deepspeed_problems

KEYS = deepspeed_keys()
# The form that transformers' documentation gives for ZeRO-3 with offload.
FOR_TRANSFORMERS = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16},
    "bf16": {"enabled": "auto"},
    "optimizer": "auto",
    "scheduler": "auto",
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": False},
        "offload_param": {"device": "cpu", "pin_memory": False},
        "overlap_comm": True,
        "sub_group_size": 1_000_000_000,
        "reduce_bucket_size": "auto",
    },
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
}


def run_config(**deepspeed: Any) -> RunConfig:
    required = {"model": {"path": "m"}, "data": {"path": "d.jsonl"}, "rewards": ["exact"]}
    return RunConfig.model_validate({**required, "deepspeed": deepspeed})


def told(settings: dict[str, Any], **deepspeed: Any) -> dict[str, tuple[str, str]]:
    problems = deepspeed_problems(DeepSpeedConfig(settings=settings, **deepspeed))
    return {problem.key.removeprefix("deepspeed."): (problem.what, problem.nearest) for problem in problems}


class Watched(dict[str, Any]):
    """Remembers which keys were asked for."""

    asked: set[str]

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def keys(self) -> Any:
        """DeepSpeed also writes ``key in config.keys()``."""
        return self


def test_the_known_keys_are_those_that_deepspeed_reads() -> None:
    watched = Watched(train_batch_size=1)
    watched.asked = set()
    deepspeed.DeepSpeedConfig(watched)
    top = {key for key in {*KEYS["owned"], *KEYS["unsupported"], *KEYS["passed"]} if "." not in key}
    # Another name for world sizes that grpox does not have; DeepSpeed reads it where this process is a rank.
    asked = watched.asked - {*_REMOVED_TOP_LEVEL_CONFIG_KEYS}
    assert top - {"sequence_parallel_size"} == asked - {"sequence_parallel_size"}
    fields = DeepSpeedZeroConfig.model_fields
    assert {field.alias or name for name, field in fields.items()} == {*KEYS["zero_optimization"]}
    nested = {
        key.split(".")[1]
        for key in {*KEYS["owned"], *KEYS["unsupported"]}
        if key.startswith("zero_optimization.")
    }
    assert nested <= {*fields, *KEYS["zero_optimization"]}


PARAM = "zero_optimization.offload_param.device"


@pytest.mark.parametrize(
    ("settings", "key", "what", "near"),
    [
        # The keys that grpox sets, each with the one to use.
        ({"train_batch_size": 8}, "train_batch_size", "use train.per_device_train_batch_size", ""),
        ({"gradient_clipping": 1.0}, "gradient_clipping", "use train.max_grad_norm", ""),
        ({"bf16": {"enabled": True}}, "bf16.enabled", "use model.dtype", ""),
        ({"optimizer": {"type": "AdamW"}}, "optimizer", "use train.optim", ""),
        ({"zero_optimization": {"stage": 2}}, "zero_optimization.stage", "use deepspeed.stage", ""),
        ({"zero_optimization": {"offload_param": {"device": "cpu"}}}, PARAM, "use deepspeed.offload_param", ""),
        # Those that would change the run, and those that are none.
        ({"fp16": {"enabled": True}}, "fp16.enabled", "model.dtype bfloat16", ""),
        ({"compile": {"deepcompile": True}}, "compile", "does not compile the model", ""),
        ({"gradient_allreduce_op": "x"}, "gradient_allreduce_op", "", ""),
        ({"tensor_parallel": "x"}, "tensor_parallel", "", ""),
        ({"data_efficiency": "x"}, "data_efficiency", "", ""),
        ({"comms_loger": {}}, "comms_loger", "DeepSpeed has no such key", "comms_logger"),
        (
            {"zero_optimization": {"overlap_com": True}},
            "zero_optimization.overlap_com", "DeepSpeed has no such key", "overlap_comm",
        ),
        ({"zero_optimization": 3}, "zero_optimization", "a mapping is expected", ""),
        ({"bf16": 3}, "bf16", "a mapping is expected", ""),
    ],
)  # fmt: skip
def test_settings_that_are_not_deepspeeds_to_make(
    settings: dict[str, Any], key: str, what: str, near: str
) -> None:
    [(told_key, (told_what, told_near))] = told(settings).items()
    assert (told_key, told_near) == (f"settings.{key}", near)
    assert what in told_what
    if what.startswith("use "):
        assert told_what.endswith("instead: grpox sets this key")


@pytest.mark.parametrize(
    ("offload", "what"),
    [
        ({"offload_optimizer": "nvme"}, "a folder is required because offload_optimizer is nvme"),
        ({"offload_param": "nvme"}, "a folder is required because offload_param is nvme"),
        ({"nvme_path": "/fast", "offload_param": "cpu"}, "has no effect, because neither"),
    ],
)
def test_nvme_needs_a_folder_and_a_folder_nvme(offload: dict[str, str], what: str) -> None:
    [(key, (told_what, _))] = told({}, **offload).items()
    assert key == "nvme_path"
    assert told_what.startswith(what)


def test_a_file_for_transformers_passes_where_it_leaves_things_to_the_trainer() -> None:
    assert told(FOR_TRANSFORMERS, offload_optimizer="cpu", offload_param="cpu") == {}
    ours = (PARAM, PARAM.replace("param", "optimizer"))
    assert set(told(FOR_TRANSFORMERS)) == {f"settings.{key}" for key in ours}
    settings = {"fp16": {"enabled": False}, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    assert told(settings, offload_optimizer="cpu") == {}


def test_settings_are_merged_at_every_depth() -> None:
    zero = {"offload_param": {"pin_memory": False}, "overlap_comm": "auto"}
    settings = {"zero_optimization": zero, "steps_per_print": 5, "data_types": {"grad_accum_dtype": "bf16"}}
    own = {"stage3_param_persistence_threshold": 7, "offload_param": "cpu"}
    config = run_config(**own, settings=settings)
    deepspeed_config(config, 1)["data_types"]["grad_accum_dtype"] = "fp16"
    given = deepspeed_config(config, world_size=2)
    assert given["data_types"]["grad_accum_dtype"] == "bf16"  # those of the run are not changed
    assert given["zero_optimization"] == {
        "stage": 3,
        "stage3_param_persistence_threshold": 7,
        "reduce_bucket_size": 2**24,
        "reduce_scatter": False,
        "sub_group_size": 2**24,
        "offload_param": {"device": "cpu", "pin_memory": False},
    }
    assert given["steps_per_print"] == 5
    assert (given["train_batch_size"], given["gradient_accumulation_steps"]) == (16, 1)


@pytest.mark.parametrize(
    ("ranks", "config", "expected"),
    [
        (1, {}, sys.maxsize),
        (2, {}, None),
        (1, {"offload_param": "cpu"}, None),
        (1, {"stage3_param_persistence_threshold": 7}, 7),
    ],
)
def test_a_single_rank_keeps_its_weights_whole(ranks, config, expected):
    zero = deepspeed_config(run_config(**config), ranks)["zero_optimization"]
    assert zero.get("stage3_param_persistence_threshold") == expected


def test_the_reference_has_no_optimizer_and_on_nvme_buffers_are_left_at_once() -> None:
    config = run_config(offload_param="nvme", offload_optimizer="nvme", nvme_path="/fast")
    policy, reference = deepspeed_config(config, 1), reference_config(config, 1)
    assert policy["zero_optimization"]["offload_param"]["nvme_path"] == "/fast"
    assert reference["zero_optimization"]["offload_param"]["nvme_path"] == "/fast/reference"
    assert "offload_optimizer" not in reference["zero_optimization"]
    assert "gradient_clipping" not in reference
    # DeepSpeed has five buffers; what it keeps for later would hold them.
    keys = ("max_live_parameters", "max_reuse_distance", "prefetch_bucket_size")
    zero = deepspeed_config(run_config(offload_param="nvme", nvme_path="/fast"), 1)["zero_optimization"]
    assert [zero[f"stage3_{key}"] for key in keys] == [0, 0, 0]
    zero = deepspeed_config(run_config(offload_param="cpu"), 1)["zero_optimization"]
    assert not any(f"stage3_{key}" in zero for key in keys)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"zero_optimization": {"stage3_max_live_parameters": "many"}}, "stage3_max_live_parameters: "),
        ({"zero_optimization": {"offload_param": {"pin": True}}}, "offload_param.pin: "),
        ({"bf16": {"enabeld": True}}, "enabeld: "),
    ],
)
def test_a_value_of_the_wrong_type_is_told_before_a_model_loads(settings: dict[str, Any], said: str) -> None:
    check_deepspeed(run_config())
    check_deepspeed(run_config(settings=FOR_TRANSFORMERS, offload_optimizer="cpu", offload_param="cpu"))
    assert told(settings) == {}
    [problem] = refused(check_deepspeed, run_config(settings=settings))
    assert problem.key == "deepspeed.settings"
    assert problem.what.startswith(f"DeepSpeed does not accept this value: {said}")


@pytest.fixture
def async_io(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stands for DeepSpeed's async_io op; without libaio it is not compatible."""
    builder = SimpleNamespace(is_compatible=lambda verbose: True)
    monkeypatch.setattr(get_accelerator(), "create_op_builder", {"AsyncIOBuilder": builder}.get)
    return builder


def test_nvme_needs_libaio_and_its_folder_is_made(tmp_path: Path, async_io: SimpleNamespace) -> None:
    config = run_config(offload_optimizer="nvme", nvme_path=str(tmp_path / "swap"))
    async_io.is_compatible = lambda verbose: False
    with pytest.raises(ConfigError, match="async_io needs libaio"):
        check_deepspeed(config)
    assert not (tmp_path / "swap").exists()
    async_io.is_compatible = lambda verbose: True
    check_deepspeed(config)
    assert (tmp_path / "swap").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="the folder cannot be created: "):
        check_deepspeed(run_config(offload_optimizer="nvme", nvme_path=str(tmp_path / "file" / "swap")))


@pytest.mark.usefixtures("async_io")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parameters_on_nvme_in_float32_need_an_accelerator_with_float16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """Elsewhere DeepSpeed writes them as bfloat16, and the first matrix product fails."""
    config = run_config(offload_param="nvme", nvme_path=str(tmp_path))
    config.model.dtype = dtype  # type: ignore[assignment]
    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)
    check_deepspeed(config)
    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: False)
    if dtype == "bfloat16":
        check_deepspeed(config)
    else:
        with pytest.raises(ConfigError, match="parameters on nvme only in bfloat16"):
            check_deepspeed(config)
