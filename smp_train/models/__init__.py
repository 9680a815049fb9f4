"""Models: presets, building without memory, seeded initial weights, Hugging Face weights, counts and FLOPs."""
