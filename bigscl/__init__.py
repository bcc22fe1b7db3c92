"""Multi-label image classifiers from single-label datasets, with the Spatial Consistency Loss."""

from importlib.metadata import version

__version__ = version("bigscl")
