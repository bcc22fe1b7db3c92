"""From tar shards to batches: each sample exactly once per epoch."""
