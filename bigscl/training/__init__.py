"""What a training run is made of: its step, memory, checkpoints, resuming, and log."""
