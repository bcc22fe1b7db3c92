"""Checks before a run starts: forecast, rehearsal, storage, devices, all nodes of a launcher."""
