"""Pictures of samples, epochs and runs."""
