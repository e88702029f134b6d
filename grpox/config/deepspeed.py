"""The section `deepspeed`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from grpox.config.section import Section


class DeepSpeedConfig(Section):
    stage: Literal[3] = 3
    """ZeRO stage: grpox runs on ZeRO-3."""
    stage3_param_persistence_threshold: int | None = Field(None, ge=0)
    """Parameters smaller than this stay whole on every rank; default: DeepSpeed's (100000)."""
    offload_optimizer: Literal["none", "cpu", "nvme"] = "none"
    """Place of the optimizer states, instead of the accelerator's memory."""
    offload_param: Literal["none", "cpu", "nvme"] = "none"
    """Place of the parameters' shards between their uses."""
    nvme_path: str | None = None
    """Folder on a fast local disk, for whatever is offloaded to nvme."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """DeepSpeed's own configuration, merged over grpox's; what grpox itself sets is refused here."""
