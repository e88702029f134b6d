"""Training of adapters alone (LoRA): the layers that peft makes, and what the core does with them."""
