"""Checkpoints of a run: their files, the checks of these, saving and resuming."""
