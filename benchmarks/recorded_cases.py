"""The cases of recorded_batches.py: a run file, its changes, and the parts that make its inputs fixed."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from grpox.contracts import Prompt, Rollout, Turn

LETTERS = "abcdefghijklmnopqrstuvwxyz"
LONGEST, ROWS = 9, 16
"""Most tokens of a completion, and completions of a step over all ranks."""
RUN = """
model: {dtype: float32}
generator: {path: "HERE:FixedGenerator"}
rewards: [{path: "HERE:early", isolation: thread}, {path: "HERE:short", isolation: thread, weight: 0.5}]
loss: dapo
correction: none
train: {optimizer: {path: "HERE:PlainSgd"}, learning_rate: 1.0, lr_scheduler_type: constant, max_grad_norm: 0.0,
  max_steps: 2, num_iterations: 2, num_generations: 4, gradient_accumulation_steps: 2, shuffle_dataset: false}
sampling: {max_completion_length: 9, temperature: 0.9}
deepspeed: {stage3_param_persistence_threshold: 0}
checkpoint: {every: 0}
logging: {completions_every: 0, save_completions_every: 0, system_metrics_every: 0}
record: {tokens: 0}
alarms: null
tracking: {}
""".replace("HERE", str(Path(__file__).resolve()))
VARLEN = "model.init.attn_implementation=grpox_varlen; train.prefix_sharing=false"
MODES = {
    "full logits": "train.chunked_logprobs=false",
    "padded": "train.prefix_sharing=false",
    "shared prompts": "train.prefix_sharing=true",
    "by lengths": f"{VARLEN}; train.packing=false",
    "packed": VARLEN,
    "shared with varlen": f"{VARLEN}; train.prefix_sharing=true",
    "budget": f"{VARLEN}; train.max_tokens_per_micro_batch=60",
    "checkpointing": "train.gradient_checkpointing=true",
}
"""Name -> overrides of the run file."""
LOSSES = ("grpo", "dr_grpo", "dapo", "bnpo", "luspo", "cispo", "sapo", "gspo-token", "dppo", "topr")
LOSS_CASES = {f"loss {name}": f"loss={name}" for name in LOSSES} | {
    "loss dapo two-sided": "loss={name: dapo, clip_high: 0.1, delta: 1.2}",
    "loss grpo sequence": "loss={name: grpo, level: sequence, clip_low: 0.02}",
    "loss dppo kl": "loss={name: dppo, divergence: kl, delta: 0.01}",
}
ADVANTAGES = ("group", "batch", "none", "rloo", "reinforce_plus_plus", "maxrl", "opo", "quantile", "gigpo")
LORA = "train.max_steps=3; train.num_iterations=3; model.lora={r: 4, alpha: 8}"
OTHER_CASES = {
    **{f"advantage {name}": f"advantage={name}" for name in (*ADVANTAGES, "return-to-go")},
    "advantage of each": "advantage={name: group, aggregation: normalize_then_sum}",
    "correction token-truncate": "correction={name: token-truncate, cap: 1.2}",
    "correction token-mask": "correction={name: token-mask, low: 0.8, high: 1.3}",
    "correction sequence-truncate": "correction=sequence-truncate; loss=grpo",
    "correction sequence-mask": "correction={name: sequence-mask, high: 1.2}; loss=gspo-token",
    "correction geometric-mask": "correction={name: geometric-mask, low: 0.9, high: 1.1}",
    "correction and cispo": "correction=token-truncate; loss=cispo",
    "correction and topr": "correction=token-truncate; loss=topr",
    **{f"kl {name}": f"train.beta=0.1; train.kl={name}" for name in ("k1", "k2", "k3", "unbiased")},
    "kl synced": "train.beta=0.1; train.sync_ref_model=true; train.ref_sync_steps=1",
    "entropy": "train.entropy_coef=0.1",
    "entropy adaptive": "train.adaptive_entropy={target: 2.0}",
    "entropy top": "train.top_entropy_quantile=0.3",
    "off-policy mask": "train.off_policy_mask_threshold=0.05",
    "truncated masked": "train.mask_truncated_completions=true",
    "dynamic sampling": "train.dynamic_sampling_rounds=2",
    "zero advantages": "train.skip_zero_advantage=false; loss=sapo",
    "old of the generator": "train.old_logprobs=generator",
    "one step a batch": "train.num_iterations=1",
    "two steps a batch": "train.num_iterations=1; train.steps_per_generation=4",
    "two batches": "train.max_steps=4",
    "clipped gradient": "train.max_grad_norm=0.1",
    "adamw": "train.optimizer=null; train.learning_rate=0.01; train.weight_decay=0.1",
    "lora": LORA,
    "lora kl": f"{LORA}; train.beta=0.1",
    "lora some": f"{LORA}; model.lora.target_modules=[q_proj, c_fc]; model.lora.use_rslora=true",
    "hf": "generator=hf",
    "hf filtered": "generator=hf; sampling.top_k=9; sampling.top_p=0.9; sampling.repetition_penalty=1.2",
}


def cases(ranks: int) -> dict[str, tuple[str, list[str]]]:
    """Combine settings with forward modes: name -> mode, overrides of the run file."""
    modes, combined = list(MODES), []
    for row, item in enumerate(LOSS_CASES.items()):
        combined += [(*item, modes[place]) for place in range(len(modes)) if ranks == 1 or (row + place) % 2]
    for row, item in enumerate(OTHER_CASES.items()):
        combined += [(*item, modes[(row + shift) % len(modes)]) for shift in ((0, 3) if ranks == 1 else (5,))]
    return {f"{name}, {mode}": (mode, f"{own}; {MODES[mode]}".split("; ")) for name, own, mode in combined}


class FixedGenerator:
    """Samples two turns that depend on the prompt, the place in its group and the version alone."""

    stateless = True
    provides = ("logprobs", "other-numerics", "turn_rewards", "state_keys")

    def start(self, context: Any) -> None:
        self.stop = context.stop_token_ids[0]

    def sync(self, weights: Iterable[Any], version: int) -> None:
        self.version, _ = version, [*weights]

    def generate(self, prompts: Sequence[Prompt], sampling: Any, seed: int) -> Iterator[Rollout]:
        return (self.sample(prompt, place) for prompt in prompts for place in range(prompt.num_samples))

    def sample(self, prompt: Prompt, place: int) -> Rollout:
        rng = random.Random(f"{prompt.token_ids} {place} {self.version}")
        length = rng.randint(2, LONGEST)
        ends, middle = length < LONGEST, length // 2
        tokens = [rng.randrange(2, 2 + len(LETTERS)) for _ in range(length - ends)] + [self.stop] * ends
        logprobs = tuple(rng.gauss(-3.3, (0.001, 0.1, 0.4)[place % 3]) for _ in tokens)
        # The token between the turns of a long completion is not the model's.
        mask = tuple(length < 6 or token != middle for token in range(length))
        reason, second = "stop" if ends else "length", middle + (length >= 6)
        first = Turn(0, middle, "stop", self.version, rng.random(), "first")
        turns = first, Turn(second, length, reason, self.version, rng.random(), rng.choice("uv"))
        ids = prompt.group_id, place, prompt.token_ids, tuple(tokens)
        return Rollout(*ids, reason, self.version, logprobs, mask, turns)

    def close(self) -> None: ...

    sleep = wake = close


class PlainSgd:
    def build(self, parameters: Iterable[Any], learning_rate: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=learning_rate)


def early(completion_ids: Sequence[Sequence[int]], teaches: Sequence[bool], **columns: Any) -> list[float]:
    """Share of letters from the first half of the alphabet; 0 for prompts that teach nothing."""
    pairs = zip(completion_ids, teaches, strict=True)
    return [own * sum(token < 15 for token in ids) / len(ids) for ids, own in pairs]


def short(completion_ids: Sequence[Sequence[int]], teaches: Sequence[bool], **columns: Any) -> list[Any]:
    """1 for short completions, without an opinion on very short ones."""
    pairs = zip(completion_ids, teaches, strict=True)
    return [None if len(ids) < 3 else float(own and len(ids) < 6) for ids, own in pairs]


def make_model(folder: Path) -> None:
    """Write a tokenizer of letters, and a model whose norms compute in float64, as those of Llama would not."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    words = {token: number for number, token in enumerate(["<pad>", "<eos>", *LETTERS])}
    letters = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    letters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, pad_token="<pad>", eos_token="<eos>")
    tokenizer.save_pretrained(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": len(words)}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    ends = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0, "sliding_window": None}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("starcoder2", **sizes | heads | ends))
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=float("norm.weight" in name), std=0.1)
    model.save_pretrained(folder)
