"""Transfer of weights through files in a folder that run and server share: a backend of vLLM's weight transfer.

In shared memory the folder uses no disk. vLLM's own backends need CUDA on both sides.
https://docs.vllm.ai/en/latest/training/weight_transfer/
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from grpox_vllm_serving.launch import FILE_BACKEND, SHARED_MEMORY
from grpox_vllm_serving.protocol import WEIGHTS_FOLDER
from grpox_vllm_serving.weight_reload import as_loaded, check_all_loaded, head_is_embedding, pack_again

_NAME = re.compile(r"[0-9a-z-]+\.safetensors")


@dataclass
class NoInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Empty settings: the server chooses the folder by itself."""


@dataclass
class BucketFile(WeightTransferUpdateInfo):  # type: ignore[misc]
    """One bucket of whole parameters, in a safetensors file."""

    file: str
    """Name of the file in the server's folder."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.file):
            raise ValueError(f"no name of a file of weights: {self.file!r}")


class FileTransferEngine(WeightTransferEngine[NoInitInfo, BucketFile]):  # type: ignore[misc]
    """Loads each bucket when it is announced, and frees its memory once every layer in it is complete."""

    init_info_cls = NoInitInfo
    update_info_cls = BucketFile

    def init_transfer_engine(self, init_info: NoInitInfo) -> None:
        """Do nothing: this transfer has no connection to set up."""

    def start_weight_update(self) -> None:
        self._head_is_embedding = head_is_embedding(self.model)
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: BucketFile) -> None:
        folder = Path(os.environ[WEIGHTS_FOLDER])
        path = folder / update_info.file
        with safe_open(path, framework="pt", device=str(self.device)) as bucket:
            # On NFS the file may vanish while it is mapped and a layer is incomplete.
            copied = SHARED_MEMORY not in folder.parents
            tensors = ((name, bucket.get_tensor(name)) for name in bucket.keys())  # noqa: SIM118 - no mapping
            weights = ((name, tensor.clone() if copied else tensor) for name, tensor in tensors)
            tied = self.model_config.hf_text_config.tie_word_embeddings
            self.model.load_weights(as_loaded(weights, tied, self._head_is_embedding))

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load the bucket, and wait until it is on the device: its file is removed after the answer."""
        if self.device.type == "cpu":  # vLLM's own would synchronize an accelerator that is not there
            self.receive_weights(self.parse_update_info(update_info))
        else:
            super().update_weights(update_info)

    def finish_weight_update(self) -> None:
        try:
            check_all_loaded(self.model)
        finally:
            finalize_layerwise_reload(self.model, self.model_config)
        pack_again(self.model)

    def shutdown(self) -> None:
        """Do nothing: no file or connection is open."""


class WorkerExtension:
    """Mixin for vLLM's workers; loading it imports this module, which registers the backend."""

    def forget_weight_update(self) -> None:
        """Drop an update whose sender disappeared during it; vLLM would refuse to start another one."""
        for file in Path(os.environ[WEIGHTS_FOLDER]).glob("*.safetensors"):
            file.unlink(missing_ok=True)
        worker: Any = self
        worker.weight_transfer_engine.reset_weight_update_target()
        worker._weight_update_active = False


WeightTransferEngineFactory.register_engine(FILE_BACKEND, FileTransferEngine)
