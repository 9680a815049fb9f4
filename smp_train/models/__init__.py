"""Models: presets, configurations, construction, initial weights, Hugging Face weights, FLOPs."""
