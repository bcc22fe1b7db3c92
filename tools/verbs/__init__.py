"""Verbs of `bigscl`: one file each; the first line of its docstring is its help."""
