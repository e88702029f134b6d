"""The generator and `sampling`, as TRL's fields choose them together."""

from __future__ import annotations

from typing import Any

from grpox.runfile.from_trl.draft import Draft, component
from grpox.runfile.from_trl.fields import GENERATION_KWARGS, Verdict, parameters_of

_CONTINUOUS = ("use_transformers_continuous_batching", "use_transformers_paged")
_REGEX = ("vllm_structured_outputs_regex", "vllm_guided_decoding_regex")
_LONGEST_WAIT = 1500.0
"""Seconds that `generator.start_timeout` may have."""


def write_generation(draft: Draft) -> None:
    """Write `generator`, and into `sampling` what its library is given besides."""
    _generation_kwargs(draft)
    if not draft.get("use_vllm"):
        _hf(draft)
        return
    if draft.chosen("vllm_mode", ("colocate", "server")) == "colocate":
        _colocated(draft)
    else:
        _server(draft)
    draft.unneeded((*parameters_of("hf"), *_CONTINUOUS), "use_vllm is true")
    for name in _REGEX:
        if draft.has(name):
            draft.put("sampling.generation_kwargs.structured_outputs", {"regex": draft.get(name)})


def _generation_kwargs(draft: Draft) -> None:
    for name, value in draft.mapping("generation_kwargs", "a mapping of names and values").items():
        if ours := GENERATION_KWARGS.get(name):
            listed = ours.startswith("stop") and not isinstance(value, list)
            draft.put(f"sampling.{ours}", [value] if listed else value)
        elif (name, value) != ("do_sample", True):
            draft.put(f"sampling.generation_kwargs.{name}", value)


def _hf(draft: Draft) -> None:
    parameters = draft.given_of("hf")
    if any(draft.get(name) for name in _CONTINUOUS):
        parameters["continuous_batching"] = True
    if parameters or draft.has("use_vllm"):
        draft.put("generator", component("hf", parameters))


def _colocated(draft: Draft) -> None:
    parameters = draft.given_of("vllm-colocate")
    if draft.get("vllm_model_impl") != "vllm":
        parameters["engine"] = {"model_impl": draft.get("vllm_model_impl")}
    draft.put("generator", component("vllm-colocate", parameters))
    draft.unneeded(parameters_of("vllm-server"), "vllm_mode is colocate")
    draft.explain("vllm_mode", Verdict.SAME, "generator: vllm-colocate")


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
    of_serve = (*parameters_of("vllm-colocate"), "vllm_model_impl")
    draft.explain(of_serve, Verdict.DIFFERS, "given to `grpox serve`, which starts the server")
    draft.unneeded(("vllm_enable_sleep_mode",), "vllm_mode is server")
