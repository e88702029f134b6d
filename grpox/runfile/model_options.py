"""Checks of a model and its adapters without torch: arguments, configuration, names of layers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from grpox.config import LoraConfig, ModelConfig, TrainConfig
from grpox.config.sampling import sampling_of
from grpox.data.chat import PLAIN, is_unrendered
from grpox.errors import Problem, nearest
from grpox.runfile import paths
from grpox.runfile.checks import CheckContext
from grpox.runfile.data_files import first_value
from grpox.runtime.files import read_mapping

INSTALL = "pip install 'grpox[lora]'"
REFUSED_INIT = {
    "dtype": "use model.dtype",
    "torch_dtype": "use model.dtype",
    "pretrained_model_name_or_path": "use model.path",
    "device_map": "DeepSpeed places the weights",
    "tp_plan": "ranks hold shards of the whole model",
    "quantization_config": "all weights are trained, in model.dtype",
    "load_in_8bit": "all weights are trained, in model.dtype",
    "load_in_4bit": "all weights are trained, in model.dtype",
    "ignore_mismatched_sizes": "weights of another shape would be drawn at random",
    "output_loading_info": "grpox itself reads it",
    "state_dict": "weights come from model.path",
    "key_mapping": "the saved model could only be loaded with the same mapping",
}
"""Refused argument of `from_pretrained` -> reason."""

HARMLESS: dict[str, tuple[bool | None, ...]] = {
    "trust_remote_code": (False, None),
    "weights_only": (True,),
    "use_kernels": (False, None),
    "allow_all_kernels": (False, None),
    "kernel_config": (None,),
}
"""Argument of `from_pretrained` that can run foreign code -> values that run no code."""

POSITIONS = ("max_position_embeddings", "n_positions")
"""Keys of a model's configuration for its number of positions; the second is GPT-2's."""

CHECKPOINT_ARGUMENTS = ("use_reentrant", "preserve_rng_state", "determinism_check", "debug", "early_stop")
"""Arguments of torch.utils.checkpoint.checkpoint that a run file can write; a test compares them."""

OF_EXPERTS = re.compile("expert|router|moe|mixtral")
"""Part of a key, or of the type, in the configuration of every model with experts."""

DEQUANTIZED = ("bitsandbytes", "compressed-tensors", "fp8", "higgs", "metal", "mxfp4", "mxfp8")
"""Values of quant_method whose weights transformers can widen; a test compares them."""
OF_QUANTIZATION = re.compile(r"\.(qweight|weight_packed|SCB|absmax)$|_proj_blocks$")
"""Ends of the names of weights that only quantised checkpoints have."""
HEAD = re.compile(r"(^|\.)(lm_head|embed_out|output)\.weight$")
"""Names of a head's weight in checkpoints. Loading the model checks heads of all names."""

PARTS = re.compile(
    r".*(vision|visual|image|audio|video|speech).*_config|vq_config|visual|(img|image|audio)_processor"
)
"""Keys of a configuration that describe a part for images, audio or video, if their value is a mapping."""


def model_problems(context: CheckContext) -> Iterator[Problem]:
    """Find mistakes in the model: its folder, and what the run file says about loading it."""
    model = context.config.model
    yield from init_problems(model)
    if "model.path" not in context.given.inputs:
        yield from paths.model_problems("model.path", model.path)
        yield from checkpoint_problems(model)


def init_problems(config: ModelConfig) -> list[Problem]:
    """Find arguments that the engine sets, or that would leave weights untrained."""
    return [
        Problem(f"is not allowed here: {REFUSED_INIT[name]}", f"model.init.{name}", given=str(value))
        for name, value in config.init.items()
        if name in REFUSED_INIT
    ]


def runs_code(init: Mapping[str, Any]) -> list[str]:
    """Name the arguments that would run code from the model's folder or a hub."""
    return [
        name
        for name, value in init.items()
        if (name in HARMLESS and value not in HARMLESS[name])
        # eager, sdpa, ...; any other value is the id of a repository with a kernel.
        or ("implementation" in name and "/" in str(value))
    ]


def checkpointing_problems(train: TrainConfig) -> list[Problem]:
    """Find unknown arguments of gradient checkpointing, and arguments while it is off."""
    key = "train.gradient_checkpointing_kwargs"
    given = train.gradient_checkpointing_kwargs
    if given and not train.gradient_checkpointing:
        return [Problem("has no effect, because train.gradient_checkpointing is false", key, given=str(given))]
    what, allowed = "torch.utils.checkpoint has no such argument", ", ".join(CHECKPOINT_ARGUMENTS)
    return [
        Problem(what, f"{key}.{name}", "", str(value), allowed, nearest(name, CHECKPOINT_ARGUMENTS))
        for name, value in given.items()
        if name not in CHECKPOINT_ARGUMENTS
    ]


def media_parts(config: Mapping[str, Any], within: str = "") -> Iterator[str]:
    """Yield the dotted keys of a model's configuration that describe a part for images, audio or video."""
    for key, value in config.items():
        if not isinstance(value, Mapping) or not value:
            continue
        if PARTS.fullmatch(str(key)):
            yield f"{within}{key}"
        else:
            yield from media_parts(value, f"{within}{key}.")


def media_problem(config: Mapping[str, Any], key: str, given: str) -> Problem | None:
    """Return a problem if a model has a part for images, audio or video; None if all of it is for text."""
    parts = ", ".join(media_parts(config))
    if not parts:
        return None
    what = (
        f"is not only a text model (its config has {parts}): grpox would train it on text alone, "
        "and the saved model might lack the other parts"
    )
    return Problem(what, key, given=given, allowed="a text model, such as its language model saved alone")


def quantization_of(config: Mapping[str, Any]) -> str:
    """Name the method by which a model's config says that its weights are quantised; empty if it names none."""
    parts = [part for part in (config, config.get("text_config")) if isinstance(part, Mapping)]
    given = [part.get(key) for part in parts for key in ("quantization_config", "compression_config")]
    named = [each.get("quant_method", "bitsandbytes") for each in given if each and isinstance(each, Mapping)]
    return str(named[0]) if named else ""


def quantization_problems(method: str, model: ModelConfig) -> Iterator[Problem]:
    """Find weights quantised by `method`, unless the run file has them widened, and transformers can."""
    if method and not (model.dequantize and method in DEQUANTIZED):
        what = f"its weights are quantised ({method}), but training needs those of model.dtype"
        widened = "model.dequantize: true, or " if method in DEQUANTIZED else ""
        yield Problem(what, "model.path", given=model.path, allowed=f"{widened}the model before quantisation")


def checkpoint_problems(model: ModelConfig) -> Iterator[Problem]:
    """Find weights that a local model's config.json does not describe: quantised ones, or a head of its own."""
    folder = Path(model.path)
    config, tensors = read_mapping(folder / "config.json"), _stored_tensors(folder)
    text = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    in_bin = read_mapping(folder / "pytorch_model.bin.index.json").get("weight_map", {})
    narrow = [name for name, stored in tensors.items() if stored.dtype.startswith(("F8", "F6", "F4"))]
    narrow += [name for name in (*tensors, *in_bin) if OF_QUANTIZATION.search(name)]
    if narrow and not quantization_of(config):
        yield from quantization_problems(f"see {narrow[0]}; config.json names no method", model)
    is_tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings")) is True
    for head in filter(HEAD.search, tensors if is_tied else ()):
        own = tensors[head]
        others = [stored for name, stored in tensors.items() if name != head and not re.search(r"\d", name)]
        same = [stored for stored in others if (stored.dtype, stored.shape) == (own.dtype, own.shape)]
        if same and not any(own.read().equal(stored.read()) for stored in same):
            what = f"the checkpoint has a {head} of its own, but config.json says tie_word_embeddings: true"
            allowed = "tie_word_embeddings: false in config.json, or a checkpoint without this weight"
            yield Problem(what, "model.path", given=model.path, allowed=allowed)


def positions_of(folder: Path, init: Mapping[str, Any]) -> int | None:
    """Read the number of positions from a model's config.json; None if it names none."""
    config = read_mapping(folder / "config.json")
    text = config.get("text_config")
    places = (init, config, text if isinstance(text, dict) else {})
    numbers = (place.get(name) for place in places for name in POSITIONS)
    return next((number for number in numbers if isinstance(number, int)), None)


def plain_prompts(context: CheckContext) -> Iterator[str]:
    """Warn of plain prompts to which the template of a chat model is not applied."""
    data, source = context.config.data, template_of(context.config.model)
    if source and context.trains and not {"chat"} & data.model_fields_set | context.given.inputs:
        yield from [PLAIN] * is_unrendered(first_value(Path(data.path or ""), data.prompt_column), source)


def template_of(config: ModelConfig) -> str:
    """Return the chat template in a model's folder, or in the hub's cache; empty if there is none."""
    folder = Path(config.path)
    if not folder.is_absolute():
        from huggingface_hub import snapshot_download

        with suppress(ValueError, OSError):
            folder = Path(snapshot_download(config.path, local_files_only=True))
    own = read_mapping(folder / "tokenizer_config.json").get("chat_template") or ""
    with suppress(ValueError, OSError):
        own = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    return str(config.chat_template_kwargs.get("chat_template") or own)


def length_problems(context: CheckContext) -> Iterator[Problem]:
    """Find lengths of prompts and completions that together exceed the model's positions."""
    config, prompt = context.config, context.config.data.max_prompt_length
    positions = positions_of(Path(config.model.path), config.model.init)
    if positions is None or "model.path" in context.given.inputs:
        return
    lengths = {"sampling": config.sampling.max_completion_length} if context.trains else {}
    if config.evaluation is not None:
        longest = sampling_of(config.evaluation, config.sampling).max_completion_length
        own = config.evaluation.sampling.max_completion_length is not None
        lengths["evaluation.sampling" if own else "sampling"] = longest
    for section, completion in lengths.items():
        key = f"{section}.max_completion_length"
        if completion >= positions:
            what = f"leaves no room for a prompt: the model has {positions} positions"
            yield Problem(what, key, given=str(completion), allowed=f"less than {positions}")
        elif prompt is not None and prompt + completion > positions:
            what = f"with {key} {completion} this is more than the model's {positions} positions"
            allowed = f"at most {positions - completion}"
            yield Problem(what, "data.max_prompt_length", given=str(prompt), allowed=allowed)


def lora_problems(context: CheckContext) -> Iterator[Problem]:
    """Find reasons why adapters cannot be trained."""
    config, lora = context.config, context.config.model.lora
    if lora is None:
        return
    if find_spec("peft") is None:
        yield Problem(f"adapters need peft: {INSTALL}", "model.lora")
    if lora.target_modules == [] and not lora.target_parameters:
        what = "is empty: write all-linear, or a list of names such as [q_proj, v_proj]"
        yield Problem(what, "model.lora.target_modules", given="[]")
    if config.train.sync_ref_model:
        what = "does not work with adapters: the reference is then the frozen model without adapters"
        yield Problem(what, "train.sync_ref_model", given="true", allowed="false, or no model.lora")
    if config.train.gradient_checkpointing_kwargs.get("use_reentrant"):
        what = "does not work with adapters: with frozen embeddings, re-entrant checkpoints give no gradient"
        key = "train.gradient_checkpointing_kwargs.use_reentrant"
        yield Problem(what, key, given="true", allowed="false")
    if "model.path" not in context.given.inputs:
        yield from _misspelt(lora, weight_names(Path(config.model.path)))


def weight_names(folder: Path) -> list[str]:
    """Read the names of the weights from the headers of a model's files; empty if there are none."""
    return list(
        read_mapping(folder / "model.safetensors.index.json").get("weight_map") or _stored_tensors(folder)
    )


class _Stored(NamedTuple):
    """A tensor in a safetensors file."""

    file: Path
    name: str
    dtype: str
    shape: list[int]

    def read(self) -> Any:
        """Return its bytes, so that those of any type can be compared."""
        import torch

        with safe_open(self.file, "pt") as weights:
            return weights.get_tensor(self.name).view(torch.uint8)


def _stored_tensors(folder: Path) -> dict[str, _Stored]:
    """Read the headers of a model's safetensors files, by the name of the tensor."""
    index = read_mapping(folder / "model.safetensors.index.json").get("weight_map")
    tensors = {}
    for file in {folder / name for name in index.values()} if index else [folder / "model.safetensors"]:
        with suppress(OSError, SafetensorError), safe_open(file, "np") as weights:  # loading reports the error
            for name in weights.keys():  # noqa: SIM118 - not a mapping
                part = weights.get_slice(name)
                tensors[name] = _Stored(file, name, part.get_dtype(), part.get_shape())
    return tensors


def _misspelt(lora: LoraConfig, weights: Sequence[str]) -> Iterator[Problem]:
    """Find names that resemble, but do not equal, a name in the checkpoint.

    Other unknown names are checked once the model is loaded: some architectures name layers differently from
    their checkpoints.
    """
    parts = [name.split(".") for name in weights if name.endswith(".weight")]
    known = list(dict.fromkeys(part[-2] for part in parts if len(part) > 1))
    inside = {part for name in parts for part in name}
    for key in ("target_modules", "exclude_modules"):
        names = getattr(lora, key)
        for name in names if isinstance(names, list) else []:
            last = name.rpartition(".")[2]
            near = nearest(last, known)
            if last not in inside and near:
                what, allowed = "no such layer in this model", ", ".join(known)
                yield Problem(what, f"model.lora.{key}", given=name, allowed=allowed, nearest=near)
