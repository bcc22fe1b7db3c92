"""A training run: its folder, step, state, memory and log."""
