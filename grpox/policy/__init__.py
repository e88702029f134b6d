"""The policy: model, adapters, ZeRO-3 engine, log-probabilities, and export of its weights.

`models` loads model and tokenizer; `lora` and `adapter_folder` are for training only adapters. `engine` is
DeepSpeed ZeRO-3 around the policy and the reference. `batch` holds the training samples, and pads them or joins
them in rows; `logprobs` computes their log-probabilities, from all logits or in the faster modes that
`scoring_forward` installs. `weight_stream` gathers shards into whole tensors for generators and files.
`memory_plan` computes the memory of a run.
"""
