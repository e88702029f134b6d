"""`grpox serve`: what it starts vLLM with, and what it refuses before vLLM loads."""

import inspect
import json
import socket
from importlib import metadata

import pytest
from support.architectures import tiny_model
from support.problems import problem_of
from typer.testing import CliRunner

from grpox.cli.app import app
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


def test_the_token_is_in_the_environment_alone_and_its_guard_is_outermost(tmp_path):
    line = command(settings())
    assert not any(TOKEN in argument for argument in line)
    assert [name for name, value in of(tmp_path).items() if TOKEN in value] == ["GRPOX_SERVER_TOKEN"]
    middleware = [line[place + 1] for place, argument in enumerate(line) if argument == "--middleware"]
    assert middleware[-1] == "grpox_vllm_serving.protocol.TokenGuard"


def test_it_listens_here_alone_unless_asked_otherwise(tmp_path, monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)  # a run in this process may have set it
    assert value_of(command(settings()), "--host") == "127.0.0.1"
    assert of(tmp_path)["GLOO_SOCKET_IFNAME"] == "lo"
    assert "GLOO_SOCKET_IFNAME" not in of(tmp_path, host="0.0.0.0")


def test_a_users_variables_stay_but_not_those_that_guard_the_server(tmp_path, monkeypatch):
    precision = "VLLM_FLOAT32_MATMUL_PRECISION"
    monkeypatch.delenv(precision, raising=False)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    given = of(tmp_path)
    assert "VLLM_LOGGING_LEVEL" not in given
    assert given["VLLM_ALLOW_INSECURE_SERIALIZATION"] == "0"
    # With CUDA it multiplies float32 as the trainer does.
    assert [of(tmp_path, cuda=cuda).get(precision) for cuda in (True, False)] == ["high", None]


def test_sizes_and_the_way_of_weights_are_passed_on():
    line = command(settings(max_model_len=64, kv_cache_gib=0.5, extra=["--max-num-seqs", "3"]))
    assert value_of(line, "--max-model-len") == "64"
    assert value_of(line, "--kv-cache-memory-bytes") == str(2**29)
    assert line[-2:] == ["--max-num-seqs", "3"]
    assert "--gpu-memory-utilization" not in line
    assert json.loads(value_of(line, "--weight-transfer-config")) == {"backend": "grpox_file"}
    on_cuda = command(settings(cuda=True, gpu_memory_utilization=0.5, nccl=True))
    assert value_of(on_cuda, "--gpu-memory-utilization") == "0.5"
    assert "--kv-cache-memory-bytes" not in on_cuda
    assert "--enforce-eager" not in on_cuda
    assert json.loads(value_of(on_cuda, "--weight-transfer-config")) == {"backend": "nccl"}


@pytest.mark.parametrize(
    "argument", ["--api-key", "--middleware=mine.Mine", "--worker_extension_cls", "--host"]
)
def test_arguments_that_grpox_sets_are_refused(argument):
    assert problem_of(refuse_owned, ["--max-num-seqs", "3", argument]).given == argument
    options = {f"--{name.replace('_', '-')}" for name in inspect.signature(serve).parameters}
    assert {instead for instead in OWNED.values() if instead.startswith("--")} <= options


def refused(*arguments):
    return problem_of(CliRunner().invoke, app, ["serve", *arguments], catch_exceptions=False)


@pytest.fixture
def with_vllm(monkeypatch):
    version = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "0.32.0" if name == "vllm" else version(name))


def test_mistakes_are_refused_before_vllm_loads(with_vllm, tmp_path):
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


def test_help_and_the_refusal_without_vllm_teach(monkeypatch):
    text = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "120"}).output
    assert "generator=vllm-server" in text
    assert "GRPOX_SERVER_TOKEN" in text

    def version(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    assert "make vllm" in refused("quickstart").what


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
