"""The decoder layers of Llama-shaped models with a hand-written backward: what LoRA training spends its time in."""
