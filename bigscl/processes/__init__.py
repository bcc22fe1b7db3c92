"""The processes of a job: accelerator, ranks, signals, and what the hardware can do."""
