"""Every setting of a run, and reading them from YAML files and command lines. No torch."""
