"""The policy's adapter in vLLM by itself: the frozen weights are brought once, and a sync brings A and B alone.

vLLM loads an adapter from files as peft writes them, into room that it sets apart when the engine starts.
https://docs.vllm.ai/en/latest/features/lora/
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, get_args

from torch import nn

from grpox.errors import ConfigError, Problem
from grpox.toolkit import ADAPTER, adapted_layers, stream_adapters, write_adapter
from grpox_vllm_serving.launch import SHARED_MEMORY

KEY = "generator.lora_sync"
NAME, NUMBER = "policy", 1
"""What the engine calls the only adapter that it has."""


class AdapterFiles:
    """The adapter of `policy` in a folder of this process, for its engine to read."""

    def __init__(self, policy: nn.Module) -> None:
        """
        Raises:
            ConfigError: vLLM has no room for an adapter of this rank, or of the head.
        """
        self._policy = policy
        self._layers = adapted_layers(policy)
        # Removed with this object too, where a run ends before its generator is closed.
        self._files = tempfile.TemporaryDirectory(
            prefix="grpox-adapter-", dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
        )
        self._check_head()
        self.arguments: dict[str, Any] = {
            "enable_lora": True,
            "max_loras": 1,
            "max_lora_rank": self._room(),
            # Layers that have none would compute with zeros.
            "lora_target_modules": list(dict.fromkeys(name.rpartition(".")[2] for name in self._layers)),
        }
        """Of vLLM's engine."""

    @property
    def request(self) -> Any:
        """What a request for completions names the adapter by."""
        from vllm.lora.request import LoRARequest

        return LoRARequest(NAME, NUMBER, self._files.name)

    def send(self, engine: Any) -> None:
        """Have the engine take the adapter as it is now; a collective."""
        from vllm.lora.request import LoRARequest

        state = {name: tensor.cpu() for name, tensor in stream_adapters(self._policy)}
        write_adapter(self._policy, state, "", Path(self._files.name))
        engine.llm_engine.add_lora(LoRARequest(NAME, NUMBER, self._files.name, load_inplace=True))

    def close(self) -> None:
        """Remove the files."""
        self._files.cleanup()

    def _check_head(self) -> None:
        head = next((name for name in self._layers if "." not in name), None)
        if head is not None:
            what = f"vLLM takes no adapter of the head ({head}) by itself"
            raise ConfigError(Problem(what, KEY, given="adapter", allowed="merged"))

    def _room(self) -> int:
        """The smallest rank that vLLM sets room apart for and that holds the adapter's."""
        from vllm.config.lora import MaxLoRARanks

        rank = next(iter(self._layers.values())).r[ADAPTER]
        fitting = [room for room in get_args(MaxLoRARanks) if room >= rank]
        if not fitting:
            what = f"vLLM takes adapters of rank {max(get_args(MaxLoRARanks))} at most, and this is of {rank}"
            raise ConfigError(Problem(what, KEY, given="adapter", allowed="merged"))
        return int(min(fitting))
