"""`grpox serve`: what it starts vLLM with, and what it refuses before vLLM loads."""

import inspect
import json
import os
import socket
from importlib import metadata

import pytest
from support.architectures import tiny_model
from typer.testing import CliRunner

from grpox.cli.app import app
from grpox.errors import ConfigError
from grpox.runfile.load import load_run
from grpox_vllm_serving.command import serve
from grpox_vllm_serving.launch import OWNED, ServerSettings, command, environment, refuse_owned

TOKEN = "a-secret-0123456789"


def settings(**changes):
    return ServerSettings(**{"model": "m", "token": TOKEN} | changes)


def value_of(line, option):
    return line[line.index(option) + 1]


def of(folder, **changes):
    """The environment of a server."""
    return environment(settings(**changes), folder, folder, "start")


def test_the_token_is_in_the_environment_and_not_on_the_command_line(tmp_path):
    assert not any(TOKEN in argument for argument in command(settings()))
    assert [name for name, value in of(tmp_path).items() if TOKEN in value] == ["GRPOX_SERVER_TOKEN"]


def test_it_listens_here_alone_unless_told_otherwise(tmp_path, monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)  # a run in this process may have set it
    assert value_of(command(settings()), "--host") == "127.0.0.1"
    assert of(tmp_path)["GLOO_SOCKET_IFNAME"] == "lo"
    assert "GLOO_SOCKET_IFNAME" not in of(tmp_path, host="0.0.0.0")


def test_the_guard_is_outermost():
    line = command(settings())
    middleware = [line[place + 1] for place, argument in enumerate(line) if argument == "--middleware"]
    assert middleware[-1] == "grpox_vllm_serving.protocol.TokenGuard"


def test_what_a_user_set_in_the_environment_stays_but_not_what_guards_the_server(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    given = of(tmp_path)
    assert "VLLM_LOGGING_LEVEL" not in given
    assert given["VLLM_ALLOW_INSECURE_SERIALIZATION"] == "0"


def test_a_server_with_cuda_multiplies_float32_as_the_trainer_does(tmp_path, monkeypatch):
    name = "VLLM_FLOAT32_MATMUL_PRECISION"
    monkeypatch.delenv(name, raising=False)
    assert [of(tmp_path, cuda=cuda).get(name) for cuda in (True, False)] == ["high", None]


def test_weights_travel_by_nccl_or_by_file():
    assert json.loads(value_of(command(settings()), "--weight-transfer-config")) == {"backend": "grpox_file"}
    assert json.loads(value_of(command(settings(nccl=True)), "--weight-transfer-config")) == {"backend": "nccl"}


def test_sizes_are_passed_on():
    line = command(settings(max_model_len=64, kv_cache_gib=0.5, extra=["--max-num-seqs", "3"]))
    assert value_of(line, "--max-model-len") == "64"
    assert value_of(line, "--kv-cache-memory-bytes") == str(2**29)
    assert line[-2:] == ["--max-num-seqs", "3"]
    assert "--gpu-memory-utilization" not in line
    on_cuda = command(settings(cuda=True, gpu_memory_utilization=0.5))
    assert value_of(on_cuda, "--gpu-memory-utilization") == "0.5"
    assert "--kv-cache-memory-bytes" not in on_cuda
    assert "--enforce-eager" not in on_cuda


@pytest.mark.parametrize(
    "argument", ["--api-key", "--middleware=mine.Mine", "--worker_extension_cls", "--host"]
)
def test_arguments_that_grpox_sets_are_refused(argument):
    with pytest.raises(ConfigError) as caught:
        refuse_owned(["--max-num-seqs", "3", argument])
    (problem,) = caught.value.problems
    assert problem.given == argument


def test_every_owned_argument_that_names_another_names_a_real_one():
    options = {f"--{name.replace('_', '-')}" for name in inspect.signature(serve).parameters}
    assert {instead for instead in OWNED.values() if instead.startswith("--")} <= options


def refused(*arguments):
    with pytest.raises(ConfigError) as caught:
        CliRunner().invoke(app, ["serve", *arguments], catch_exceptions=False)
    (problem,) = caught.value.problems
    return problem


@pytest.fixture
def with_vllm(monkeypatch):
    version = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "0.32.0" if name == "vllm" else version(name))


def test_mistakes_are_told_before_vllm_loads(with_vllm, tmp_path):
    assert refused("quickstart", "--dtype", "float16").allowed == "auto, float32, bfloat16"
    assert refused("quickstart", "--weights", "flie").nearest == "file"
    assert refused(str(tmp_path)).what == "no config.json in this folder"
    assert refused("./no-such-model").key == "MODEL"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        problem = refused("quickstart", "--port", str(taken.getsockname()[1]))
    assert "cannot listen on this address" in problem.what
    assert refused("quickstart", "--weights-dir", str(tmp_path / "x")).key == "--weights-dir"


def test_without_vllm_it_says_what_to_install(monkeypatch):
    def version(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    assert "make vllm" in refused("quickstart").what


def test_help_teaches(monkeypatch):
    monkeypatch.setitem(os.environ, "COLUMNS", "120")
    text = CliRunner().invoke(app, ["serve", "--help"]).output
    assert "generator=vllm-server" in text
    assert "GRPOX_SERVER_TOKEN" in text


@pytest.fixture
def command_of(with_vllm, monkeypatch, tmp_path):
    """Return the command line of vLLM that `grpox serve` of a run file makes."""
    started = []
    monkeypatch.setattr("grpox_vllm_serving.command._serve", started.append)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 8)

    def ask(model, *options, data=""):
        (tmp_path / "run.yaml").write_text(
            f"model: {{{model}}}\ndata: {{path: rows.jsonl{data}}}\nrewards: [exact]\n"
            "sampling: {max_completion_length: 4}\n"
        )
        done = CliRunner().invoke(app, ["serve", str(tmp_path / "run.yaml"), *options])
        assert done.exit_code == 0, done.output
        return command(started[0])

    return ask


@pytest.mark.parametrize(("cast", "expected"), [("false", []), ("true", ["float32"])])
def test_a_run_names_the_type_of_the_servers_head(cast, expected, command_of):
    path = load_run("quickstart").config.model.path
    line = command_of(f"path: {path}, cast_lm_head_to_fp32: {cast}", "--", "--max-num-seqs", "8")
    overrides = [line[place + 1] for place, argument in enumerate(line) if argument == "--hf-overrides"]
    assert [json.loads(each)["head_dtype"] for each in overrides] == expected
    assert line[-2:] == ["--max-num-seqs", "8"]
    assert "--max-model-len" not in line


@pytest.mark.parametrize(("options", "length"), [([], "18"), (["--max-model-len", "60"], "60")])
def test_a_run_names_the_length_by_which_position_factors_are_chosen(options, length, command_of, tmp_path):
    factors = {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
    model = tiny_model("phi3", original_max_position_embeddings=16, rope_scaling=factors)
    model.save_pretrained(tmp_path / "m")
    line = command_of("path: m", *options, data=", max_prompt_length: 14")
    assert value_of(line, "--max-model-len") == length
