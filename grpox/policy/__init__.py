"""The policy: its model, adapters, ZeRO-3 engine, log-probabilities, and its weights on their way out.

`models` loads model and tokenizer; `lora` and the `adapter_` modules train adapters alone. `engine` is
DeepSpeed ZeRO-3 around the policy, and around the reference. `batch` holds the samples to train on, and pads
them or lays them out in rows; `logprobs` gives their log-probabilities, by all logits or in modes that save
work, which `scoring_forward` installs. `weight_stream` gathers shards into whole tensors for generators and
files. `memory_plan` computes what a run takes.
"""
