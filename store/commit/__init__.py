"""The life of a store: creation, snapshots, lease, compaction and checks."""
