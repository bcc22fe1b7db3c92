"""Multi-label image classifiers from single-label datasets, with the Spatial Consistency Loss.

The names below are for own training loops and notebooks. Each is imported when it is first used: torch
takes seconds.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bigscl.config import StoreConfig
    from bigscl.config import make_objective as objective
    from bigscl.data.index import load_index
    from bigscl.data.loader import Loader
    from bigscl.data.transforms import TrainingTransform
    from bigscl.data.webdataset import RandomResizedCropWithView, SampleIds
    from bigscl.losses.registry import LossInputs
    from bigscl.memory.lookup import MemoryBatch, RepeatedSample, SampleViews
    from bigscl.memory.memory import Memory
    from bigscl.models.spatial import MapPooling, build_model
    from bigscl.store import Annotations
    from bigscl.tools.run import open_run

__version__ = version("bigscl")

__all__ = [
    "Annotations",
    "Loader",
    "LossInputs",
    "MapPooling",
    "Memory",
    "MemoryBatch",
    "RandomResizedCropWithView",
    "RepeatedSample",
    "SampleIds",
    "SampleViews",
    "StoreConfig",
    "TrainingTransform",
    "build_model",
    "load_index",
    "objective",
    "open_run",
]

# Where each name is defined, and as what.
_DEFINED = {
    "Annotations": ("bigscl.store", "Annotations"),
    "Loader": ("bigscl.data.loader", "Loader"),
    "SampleViews": ("bigscl.memory.lookup", "SampleViews"),
    "LossInputs": ("bigscl.losses.registry", "LossInputs"),
    "MapPooling": ("bigscl.models.spatial", "MapPooling"),
    "Memory": ("bigscl.memory.memory", "Memory"),
    "MemoryBatch": ("bigscl.memory.lookup", "MemoryBatch"),
    "RandomResizedCropWithView": ("bigscl.data.webdataset", "RandomResizedCropWithView"),
    "RepeatedSample": ("bigscl.memory.lookup", "RepeatedSample"),
    "SampleIds": ("bigscl.data.webdataset", "SampleIds"),
    "StoreConfig": ("bigscl.config", "StoreConfig"),
    "TrainingTransform": ("bigscl.data.transforms", "TrainingTransform"),
    "build_model": ("bigscl.models.spatial", "build_model"),
    "load_index": ("bigscl.data.index", "load_index"),
    "objective": ("bigscl.config", "make_objective"),
    "open_run": ("bigscl.tools.run", "open_run"),
}


def __getattr__(name: str) -> Any:
    if name not in _DEFINED:
        raise AttributeError(f"module 'bigscl' has no attribute {name!r}")
    module, defined = _DEFINED[name]
    globals()[name] = found = getattr(import_module(module), defined)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
