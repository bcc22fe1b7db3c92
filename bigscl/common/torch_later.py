"""Torch, imported when one of its names is first used: configs and `--help` need losses, and never torch.

Modules that they import have it in place of torch, except for type checkers.
"""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    return getattr(import_module("torch"), name)
