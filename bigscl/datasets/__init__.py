"""Public datasets, and folders of your own, as tar shards."""
