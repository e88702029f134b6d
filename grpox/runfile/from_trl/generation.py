"""The generator and `sampling`, as TRL's fields choose them together."""

from __future__ import annotations

from typing import Any

from grpox.runfile.from_trl.algorithm import chosen, component
from grpox.runfile.from_trl.draft import Draft
from grpox.runfile.from_trl.field import Verdict

_HF = ("ds3_gather_for_generation", "cache_implementation")
_CONTINUOUS = ("use_transformers_continuous_batching", "use_transformers_paged")
_COLOCATED = {
    "vllm_gpu_memory_utilization": "gpu_memory_utilization",
    "vllm_max_model_length": "max_model_len",
    "vllm_tensor_parallel_size": "tensor_parallel_size",
    "vllm_enable_sleep_mode": "sleep",
}
_SERVER = ("vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout")
_REGEX = ("vllm_structured_outputs_regex", "vllm_guided_decoding_regex")
_LONGEST_WAIT = 1500.0
"""Seconds that `generator.start_timeout` may have."""

_SAMPLING = {
    "max_new_tokens": "max_completion_length",
    "max_tokens": "max_completion_length",
    "min_new_tokens": "min_completion_length",
    "min_tokens": "min_completion_length",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "stop": "stop",
    "stop_strings": "stop",
    "stop_token_ids": "stop_token_ids",
}
"""Keys of generation_kwargs, of either library, that `sampling` has itself; in TRL they win over its fields."""


def write_generation(draft: Draft) -> None:
    """Write `generator`, and into `sampling` what its library is given besides."""
    _generation_kwargs(draft)
    if not draft.get("use_vllm"):
        _hf(draft)
    elif chosen(draft, "vllm_mode", ("colocate", "server")) == "colocate":
        _colocated(draft)
    else:
        _server(draft)


def _generation_kwargs(draft: Draft) -> None:
    given = draft.get("generation_kwargs") or {}
    if not isinstance(given, dict):
        draft.refuse("generation_kwargs", "is no mapping", "a mapping of names and values")
        return
    for name, value in given.items():
        if name in _SAMPLING:
            listed = _SAMPLING[name].startswith("stop") and not isinstance(value, list)
            draft.put(f"sampling.{_SAMPLING[name]}", [value] if listed else value)
        elif (name, value) != ("do_sample", True):
            draft.put(f"sampling.generation_kwargs.{name}", value)


def _hf(draft: Draft) -> None:
    parameters: dict[str, Any] = {}
    for name in _HF:
        if draft.has(name):
            parameters[name.replace("ds3_gather_for_generation", "gather_weights")] = draft.get(name)
    if any(draft.get(name) for name in _CONTINUOUS):
        parameters["continuous_batching"] = True
    if parameters or draft.has("use_vllm"):
        draft.put("generator", component("hf", parameters))
    why = "use_vllm was not read" if draft.unread("use_vllm") else "use_vllm is false"
    draft.unneeded((*_COLOCATED, *_SERVER, *_REGEX, "vllm_mode", "vllm_model_impl"), why)


def _colocated(draft: Draft) -> None:
    parameters = {ours: draft.get(name) for name, ours in _COLOCATED.items() if draft.has(name)}
    if draft.get("vllm_model_impl") != "vllm":
        parameters["engine"] = {"model_impl": draft.get("vllm_model_impl")}
    draft.put("generator", component("vllm-colocate", parameters))
    _with_vllm(draft)
    draft.unneeded(_SERVER, "vllm_mode is colocate")
    draft.tell("vllm_mode", Verdict.SAME, "generator: vllm-colocate")


def _server(draft: Draft) -> None:
    url = draft.get("vllm_server_base_url")
    if not url:
        # 0.0.0.0 is where a server listens; grpox asks the one of this machine.
        host = str(draft.get("vllm_server_host")).replace("0.0.0.0", "127.0.0.1")
        url = f"http://{host}:{draft.get('vllm_server_port')}"
    parameters: dict[str, Any] = {"urls": [url]}
    wait = draft.get("vllm_server_timeout")
    if draft.has("vllm_server_timeout") and isinstance(wait, int | float):
        parameters["start_timeout"] = min(float(wait), _LONGEST_WAIT)
    draft.put("generator", component("vllm-server", parameters), "start it with `grpox serve`")
    _with_vllm(draft)
    draft.unneeded(("vllm_enable_sleep_mode",), "vllm_mode is server")
    for name in (*_COLOCATED, "vllm_model_impl"):
        if name != "vllm_enable_sleep_mode":
            draft.tell(name, Verdict.DIFFERS, "given to `grpox serve`, which starts the server")


def _with_vllm(draft: Draft) -> None:
    draft.unneeded((*_HF, *_CONTINUOUS), "use_vllm is true")
    for name in _REGEX:
        if draft.has(name):
            draft.put("sampling.generation_kwargs.structured_outputs", {"regex": draft.get(name)})
