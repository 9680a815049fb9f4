"""Models: presets, building on meta, seeded initial weights, Hugging Face weights, counts and FLOPs."""
