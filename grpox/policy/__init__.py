"""The policy: its model, adapters, ZeRO-3 engine, log-probabilities, and its weights on their way out.

`models` loads model and tokenizer; `lora` and the `adapter_` modules train adapters alone. `engine` is
DeepSpeed ZeRO-3 around the policy, and around the reference. `batch` pads rollouts into tensors; `logprobs`
gives the log-probabilities of a padded batch, by all logits or in the ways of `forward_modes` that save
work, which `scoring_forward` installs, `row_layout` lays out and `chunked_head` computes. `weight_stream`
gathers shards into whole tensors for generators and files. `memory_plan` computes what a run takes.
"""
