"""From prompts to completions, their rewards and advantages."""
