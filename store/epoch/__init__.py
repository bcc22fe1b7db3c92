"""An epoch on a store: shards in RAM, and threads that read ahead and write behind."""
