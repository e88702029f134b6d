"""Prompts become completions, rewards and advantages.

`collector` makes one generation batch: `sampler` samples this rank's groups, `scorer` scores them and gathers
those of all ranks, then the rewards become advantages. `streaming_scorer` scores whole groups while others are
still sampled, `prefetch` samples a batch during the update before it, `dynamic_sampling` replaces groups that
teach nothing. `rewards` calls reward functions.
"""
