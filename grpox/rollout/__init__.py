"""Prompts become completions, rewards and advantages.

`collector` makes one generation batch: `sampler` samples this rank's groups, perhaps during the update before
it; they are scored and gathered from all ranks, then the rewards become advantages. `streaming_scorer` scores
whole groups while others are still sampled, `dynamic_sampling` replaces groups that teach nothing. `rewards`
calls reward functions.
"""
