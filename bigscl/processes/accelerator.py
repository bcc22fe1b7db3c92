"""From the command line to an accelerator: what every job started by `accelerate launch` does first."""

import os
from datetime import timedelta
from pathlib import Path

import torch
from accelerate import Accelerator, InitProcessGroupKwargs

from bigscl.config.reading import load_config
from bigscl.config.schema import Config
from bigscl.processes.hardware import keep_freed_memory, usable_precision
from bigscl.processes.network import choose_interface

USAGE = """usage: accelerate launch -m bigscl.train CONFIG [--section.key value ...]
                         [--resume auto|never|CHECKPOINT] [--print-config]

Train a multi-label classifier as the YAML file CONFIG says. Any setting can be given on the command line:

  accelerate launch -m bigscl.train configs/quickstart_scl.yaml --run runs/mine --data.batch_size 16

--resume        auto (the default): go on from the newest checkpoint in the run's folder, if there is one;
                never: refuse to; or the folder of a checkpoint
--print-config  show the config with all its defaults, and end"""


def rank_of_this_process() -> int:
    """The rank that the launcher gave, known before anything is set up."""
    return int(os.environ.get("RANK", "0"))


def first_on_this_machine() -> bool:
    """Whether this is the process that speaks for its machine."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def parse(arguments: list[str]) -> tuple[Config, str, bool]:
    """(config, resume, whether only to show it) of a command line."""
    if not arguments or {"-h", "--help"} & set(arguments):
        if rank_of_this_process() == 0:
            print(USAGE)
        raise SystemExit(0 if arguments else 2)
    path, *rest = arguments
    resume, show, overrides = "auto", False, []
    while rest:
        argument = rest.pop(0)
        if argument == "--print-config":
            show = True
        elif argument == "--resume" and rest:
            resume = rest.pop(0)
        else:
            overrides.append(argument)
    return load_config(Path(path), overrides), resume, show


def start_accelerator(config: Config) -> Accelerator:
    """Accelerate, with the precision, the patience and the trackers of the run."""
    cuda = torch.cuda.is_available() and os.environ.get("ACCELERATE_USE_CPU", "").lower() != "true"
    precision = usable_precision(config.hardware.precision, torch.device("cuda" if cuda else "cpu"))
    if not cuda:
        keep_freed_memory()
    choose_interface()
    return Accelerator(
        mixed_precision="no" if precision == "fp32" else precision,
        log_with=list(config.log.trackers) or None,
        project_dir=str(config.run),
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(minutes=config.hardware.timeout_minutes))],
    )
