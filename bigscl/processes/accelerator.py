"""The accelerator of a run."""

import os
from datetime import timedelta

import torch
from accelerate import Accelerator, InitProcessGroupKwargs

from bigscl.config import Config
from bigscl.processes.hardware import keep_freed_memory, make_deterministic, usable_precision
from bigscl.processes.network import choose_interface


def start_accelerator(config: Config) -> Accelerator:
    """Return accelerate with the precision, the timeout and the trackers of the run."""
    cuda = torch.cuda.is_available() and os.environ.get("ACCELERATE_USE_CPU", "").lower() != "true"
    precision = usable_precision(config.hardware.precision, torch.device("cuda" if cuda else "cpu"))
    if not cuda:
        keep_freed_memory()
    choose_interface()
    if config.hardware.deterministic:
        make_deterministic()
    return Accelerator(
        mixed_precision="no" if precision == "fp32" else precision,
        log_with=list(config.log.trackers) or None,
        project_dir=str(config.run),
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(minutes=config.hardware.timeout_minutes))],
    )
