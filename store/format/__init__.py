"""The format of a store: specs, arrays, layout, values and checksums."""
