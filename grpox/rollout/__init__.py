"""Prompts become completions, rewards and advantages.

`collector` makes one generation batch: `sampler` samples and scores its groups over all ranks, then the rewards
become advantages. `validation` compares what a generator returned with what it was asked for.
`streaming_scorer` scores whole groups while others are still sampled, `prefetch` samples a batch during the
update before it, `dynamic_sampling` replaces groups that teach nothing. `rewards` calls reward functions.
"""
