"""Score of a sequence-classification model for prompt and completion: ``logits[:, 0]``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from grpox.contracts import Message, Text
from grpox.errors import ConfigError, Problem
from grpox.toolkit import CheckedTemplate, describe, hub_kernels, text_of
from grpox_rewards.configs import RewardModelConfig
from grpox_rewards.reward_model_folder import base_of, folder_problems, tokenizer_home, tokenizer_problems


class RewardModel:
    """Scores prompt and completion with the model's own tokenizer, in batches of similar lengths.

    Conversational data goes through the tokenizer's chat template, which writes its own special tokens. Plain
    text is prompt and completion joined, with the special tokens that the tokenizer adds.

    Raises:
        ConfigError: the folder has no such model or no tokenizer, or the model has several outputs or no
            trained
            head.
    """

    def __init__(self, config: RewardModelConfig, model: PreTrainedModel | None = None) -> None:
        """Load the model and its tokenizer.

        Args:
            model: replaces the weights under `config.model`; its tokenizer is still read from there.
        """
        self.config = config
        # The folder of a model from Python may be that of a language model, without the model's one output.
        _refuse([*(folder_problems(config.model) if model is None else ())])
        self._tokenizer = _tokenizer(config)
        self.chat = CheckedTemplate(self._tokenizer, config.chat_template_kwargs)
        """The template, which gets the run's date."""
        cuda = torch.cuda.is_available()
        # The device of this rank, which was chosen when the process group started.
        self._device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        self._model = (_model(config) if model is None else model).to(self._device).eval()
        # The model's padding token and the tokenizer's truncation are set in each call, for all threads.
        self._one_at_a_time = threading.Lock()
        self._max_length = config.max_length or _positions(self._model, self._tokenizer)

    def __call__(
        self,
        *,
        prompts: Sequence[Text],
        completions: Sequence[Text],
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float]:
        """Return one score per completion.

        Raises:
            ValueError: the data is conversational and the tokenizer has no chat template.
        """
        with self._one_at_a_time:
            scores, cut = self._scored(list(zip(prompts, completions, strict=True)))
        if log_metric is not None:
            log_metric("reward_model/cut", cut)
        return scores

    def _scored(self, pairs: Sequence[tuple[Text, Text]]) -> tuple[list[float], float]:
        """Return one score per pair, and the share of pairs that were cut."""
        sequences, cut = zip(*(self._token_ids(*pair) for pair in pairs), strict=True)
        # Score each text once: in another batch its score would differ by rounding.
        texts = [tuple(ids) for ids in sequences]
        distinct = sorted(set(texts), key=lambda ids: (len(ids), ids))
        scores: dict[tuple[int, ...], float] = {}
        for start in range(0, len(distinct), self.config.batch_size):
            batch = distinct[start : start + self.config.batch_size]
            scores |= zip(batch, self._scores(batch), strict=True)
        return [scores[ids] for ids in texts], sum(cut) / len(cut)

    def _token_ids(self, prompt: Text, completion: Text) -> tuple[list[int], bool]:
        """Return the tokens that the model reads, and whether tokens were removed from the left."""
        # What a completion or a message has of special tokens stays text, so that no policy forges a turn.
        encoding = self.chat.encoding
        if isinstance(prompt, str) and isinstance(completion, str):
            (ids,) = encoding.ids([prompt + encoding.marked(completion)])
            ids = encoding.opened(ids, closes=True)
        else:
            messages = encoding.marked(conversation(prompt, completion))
            (ids,) = encoding.ids([self._rendered(messages)])
        cut = ids if self._max_length is None else encoding.shortened(ids, self._max_length)
        return list(cut), len(cut) < len(ids)

    def _rendered(self, messages: Sequence[Any]) -> str:
        if not self._tokenizer.chat_template:
            raise ValueError(f"the tokenizer of {self.config.model} has no chat template, which messages need")
        return self.chat.checked(messages, header=False)

    @torch.inference_mode()
    def _scores(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """Return one score per sequence of a batch, padded on the right, where the model looks for the last
        token."""
        text_config = self._model.config.get_text_config()
        declared = text_config.pad_token_id
        used = {token for ids in sequences for token in ids}
        # If a checkpoint declares no padding token, any token serves that none of the texts contains.
        unused = (token for token in range(text_config.vocab_size) if token not in used)
        pad = next(unused) if declared is None else declared
        width = max(map(len, sequences))
        ids = torch.tensor([[*tokens, *[pad] * (width - len(tokens))] for tokens in sequences])
        mask = torch.tensor([[1] * len(tokens) + [0] * (width - len(tokens)) for tokens in sequences])
        text_config.pad_token_id = pad
        try:
            output = self._model(input_ids=ids.to(self._device), attention_mask=mask.to(self._device))
        finally:
            text_config.pad_token_id = declared
        scores: list[float] = output.logits[:, 0].float().tolist()
        return scores


def conversation(prompt: Any, completion: Any) -> list[Message]:
    """Return prompt and completion; a completion that goes on with the prompt's last message is part of it."""
    if prompt[-1].get("role") != "assistant" or not isinstance(prompt[-1].get("content"), str):
        return [*prompt, *completion]
    whole = {**completion[0], "content": prompt[-1]["content"] + (completion[0].get("content") or "")}
    return [*prompt[:-1], whole, *completion[1:]]


def prompt_problems(config: RewardModelConfig, examples: Sequence[Sequence[Message]]) -> Iterator[Problem]:
    """Find conversations that the tokenizer of a local reward model cannot write; a hub id is not looked up."""
    if not examples or not Path(config.tokenizer or tokenizer_home(config.model)).is_dir():
        return
    chat = CheckedTemplate(_tokenizer(config), config.chat_template_kwargs)
    for example in examples:
        try:
            chat.checked(conversation(example, [{"role": "assistant", "content": "a"}]), header=False)
        except Exception as error:  # noqa: BLE001 - templates raise whatever they like
            what = f"the reward model's chat template cannot write a prompt: {describe(error)}"
            yield Problem(what, "model", given=repr(example)[:200], allowed=chat.cure(example))
            return


def _refuse(problems: list[Problem]) -> None:
    """Refuse the reward under its own key, of which those of the problems are parameters."""
    if problems:
        raise ConfigError([replace(problem, key="") for problem in problems])


def _tokenizer(config: RewardModelConfig) -> PreTrainedTokenizerBase:
    _refuse([*tokenizer_problems(config.model, config.tokenizer)])
    home = config.tokenizer or tokenizer_home(config.model)
    tokenizer: PreTrainedTokenizerBase = _loaded(home, "tokenizer", AutoTokenizer.from_pretrained)
    # transformers makes one without files, which reads every text as the same tokens or as none.
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        what = "its tokenizer knows no token but the special ones"
        raise ConfigError(what, given=home, allowed="a tokenizer with the model's tokens")
    return tokenizer


def _model(config: RewardModelConfig) -> PreTrainedModel:
    base = base_of(config.model)
    home = base or config.model
    # A base model has the language model's head; the adapter brings the one output.
    own: dict[str, Any] = {} if base is None else {"num_labels": 1}
    settings = _loaded(home, "config", AutoConfig.from_pretrained, **own)
    if settings.num_labels != 1:
        what = f"a reward model must have one output, but this one has {settings.num_labels}"
        raise ConfigError(what, given=config.model, allowed="a model with num_labels 1 in its config")
    if kernels := hub_kernels(settings):
        what = f"its config.json asks for code from a hub: the kernel {kernels[0]}"
        raise ConfigError(what, given=config.model, allowed="a model that needs no code from a hub")
    load = AutoModelForSequenceClassification.from_pretrained
    dtype = getattr(torch, config.dtype)
    model, report = _loaded(home, "model", load, dtype=dtype, output_loading_info=True, **own)
    missing = set(report["missing_keys"])
    if base is not None:
        model, brought = _merged(model, config.model)
        missing = {name for name in missing if not any(key.endswith(name) for key in brought)}
    if missing:
        what = "is not a trained sequence-classification model: its weights lack"
        raise ConfigError(f"{what} {', '.join(sorted(missing))}", given=config.model)
    loaded: PreTrainedModel = model
    return loaded


def _merged(model: PreTrainedModel, folder: str) -> tuple[PreTrainedModel, set[str]]:
    """Merge the adapter in `folder` into its base model; also return the names of the adapter's tensors."""
    try:
        from peft import PeftModel
        from peft.utils import load_peft_weights
    except ImportError as error:
        what = f"is an adapter, which needs peft (pip install 'grpox[lora]'): {text_of(error)}"
        raise ConfigError(what, given=folder) from error
    try:
        merged = PeftModel.from_pretrained(model, folder).merge_and_unload()
        return merged, set(load_peft_weights(folder, device="cpu"))
    except Exception as error:
        reason = (text_of(error).strip().splitlines() or ["no reason given"])[0]
        message = f"its adapter cannot be loaded: {type(error).__name__}: {reason}"
        raise ConfigError(message, given=folder) from error


def _loaded(home: str, what: str, load: Callable[..., Any], **arguments: Any) -> Any:
    try:
        return load(home, trust_remote_code=False, **arguments)
    except Exception as error:
        reason = (text_of(error).strip().splitlines() or ["no reason given"])[0]
        message = f"its {what} cannot be loaded: {type(error).__name__}: {reason}"
        raise ConfigError(message, given=home) from error


def _positions(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the largest number of tokens that model and tokenizer accept, if either has a limit."""
    limits = (
        getattr(model.config.get_text_config(), "max_position_embeddings", None),
        tokenizer.model_max_length,
    )
    # A tokenizer without a limit reports 10^30.
    return min((limit for limit in limits if limit is not None and limit < 10**9), default=None)
