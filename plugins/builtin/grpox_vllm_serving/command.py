"""`grpox serve`: a vLLM server that samples for runs with the generator vllm-server."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from grpox.errors import ConfigError, nearest

if TYPE_CHECKING:
    from grpox_vllm_serving.launch import ServerSettings

DTYPES = ("auto", "float32", "bfloat16")
TRANSFERS = ("auto", "nccl", "file")
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def serve(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A model folder or hub id; or a run file or recipe, whose model and dtype are used.",
        ),
    ],
    vllm_args: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- VLLM_ARGS", help="Other arguments for vLLM's server."),
    ] = None,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, metavar="N", help="Port to listen on.")] = 8000,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(DTYPES),
            help="Precision of the model; auto: bfloat16 with CUDA, else float32.",
            show_default="the run's, else auto",
        ),
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Largest number of tokens in prompt and completion.",
            show_default="the model's",
        ),
    ] = None,
    tensor_parallel_size: Annotated[
        int,
        typer.Option(
            "--tensor-parallel-size", "-tp", min=1, metavar="N", help="Number of GPUs that share the model."
        ),
    ] = 1,
    gpu_memory_utilization: Annotated[
        float,
        typer.Option(min=0.01, max=1, metavar="PART", help="Fraction of each GPU's memory; ignored on a CPU."),
    ] = 0.9,
    kv_cache_gib: Annotated[
        float | None,
        typer.Option(min=0.001, metavar="GIB", help="Memory of the KV cache.", show_default="1 on CPU"),
    ] = None,
    weights: Annotated[
        str,
        typer.Option(
            metavar="|".join(TRANSFERS), help="Transfer of weights from runs; auto: nccl with CUDA, else file."
        ),
    ] = "auto",
    weights_dir: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="Folder for weights by file, shared with the run.",
            show_default="shared memory of this host",
        ),
    ] = None,
    token_file: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="File with the token that runs must send.",
            show_default="$GRPOX_SERVER_TOKEN, or ~/.config/grpox/server-token, made when missing",
        ),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show vLLM's own log.")] = False,
) -> None:
    """Start a vLLM server that samples for runs with `generator: vllm-server`.

    The server works for one run at a time, which sends new weights after every
    update. Every path except /health requires the token. Ctrl-C stops the server.

    \b
    Examples:
      grpox serve quickstart
      grpox train quickstart generator=vllm-server      (in another terminal)
      grpox serve ./model --port 8001 --max-model-len 1024
      grpox serve ./model -tp 4 --dtype bfloat16 -- --max-num-seqs 512
    """
    from grpox.toolkit import dtype_on
    from grpox_vllm_serving.protocol import FLOAT32_HEAD, read_or_make_token

    _refuse_unknown("--dtype", dtype, DTYPES)
    _refuse_unknown("--weights", weights, TRANSFERS)
    path, of_run, casts_head, longest = _model(model)
    chosen: Any = dtype or of_run
    _refuse_used_address(host, port)
    if weights_dir is not None and not Path(weights_dir).is_dir():
        raise ConfigError("no such folder", "--weights-dir", given=weights_dir)
    # A closed terminal ends the server as SIGTERM does, unless under nohup.
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.getsignal(signal.SIGTERM))
    token = read_or_make_token(token_file)

    import torch

    from grpox_vllm_serving.launch import ServerSettings

    cuda = torch.cuda.is_available()
    if weights == "nccl" and not cuda:
        raise ConfigError("nccl needs CUDA, but there is none", "--weights", allowed="file")
    settings = ServerSettings(
        model=path,
        token=token,
        host=host,
        port=port,
        dtype=dtype_on(chosen, cuda),
        max_model_len=max_model_len or longest,
        tensor_parallel_size=tensor_parallel_size,
        gpu_memory_utilization=gpu_memory_utilization,
        kv_cache_gib=kv_cache_gib,
        cuda=cuda,
        nccl=weights == "nccl" or (weights == "auto" and cuda),
        weights_dir=None if weights_dir is None else str(Path(weights_dir).resolve()),
        verbose=verbose,
        extra=(*(FLOAT32_HEAD if casts_head else ()), *(vllm_args or ())),
    )
    _serve(settings)


def _serve(settings: ServerSettings) -> None:
    from rich.console import Console

    from grpox_vllm_serving.launch import serving

    console = Console(stderr=True)
    if settings.host not in LOOPBACK:
        console.print(
            "warning: use a certificate (-- --ssl-keyfile FILE --ssl-certfile FILE) or a trusted network: "
            f"other machines can reach {settings.host}, and the token is sent unencrypted",
            style="yellow",
            highlight=False,
        )
    with serving(settings) as server:
        with console.status("starting vLLM, which takes about a minute"):
            server.wait_until_ready()
        typer.echo(
            f"serving {settings.model} at {settings.url}  (generator: vllm-server; Ctrl-C stops the server)"
        )
        server.wait()


def _model(given: str) -> tuple[str, str, bool, int | None]:
    """Return the model for vLLM to load; of a run its dtype, if its head is cast, and the length by which its
    position factors are chosen, if there is a choice.

    Raises:
        ConfigError: it is not a model's folder, run file, recipe or hub id.
    """
    from grpox.toolkit import decide_longest, input_path, load_run, model_problems, recipe_names

    if Path(given).suffix in (".yaml", ".yml") or given in recipe_names():
        run = load_run(given)
        model, longest = run.config.model, decide_longest(run)
        return model.path, model.dtype, model.cast_lm_head_to_fp32, longest
    path = input_path(given, Path.cwd())
    if problems := list(model_problems("MODEL", path)):
        raise ConfigError(problems)
    return path, DTYPES[0], False, None


def _refuse_unknown(option: str, given: str | None, allowed: tuple[str, ...]) -> None:
    if given is not None and given not in allowed:
        near = nearest(given, allowed)
        raise ConfigError("no such value", option, given=given, allowed=", ".join(allowed), nearest=near)


def _refuse_used_address(host: str, port: int) -> None:
    """Refuse a used address at once; vLLM would fail only after it has loaded for a minute."""
    import socket  # imported late: every command loads this module

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            what = f"cannot listen on this address: {error.strerror or error}"
            raise ConfigError(what, "--host, --port", given=f"{host}:{port}") from error
