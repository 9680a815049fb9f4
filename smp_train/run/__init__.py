"""What a training run consists of besides model and data: name, position, stop requests, spikes, saving, resuming."""
