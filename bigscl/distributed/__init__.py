"""The processes of a job: accelerator, ranks, signals, worker pools, and what the hardware can do."""
