"""Training of adapters only (LoRA), with the layers that peft builds."""
