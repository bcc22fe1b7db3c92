"""Imported by a fork server: its children know whether this CPU computes in bf16."""

import torch

from bigscl.training.accelerator import usable_precision

usable_precision("bf16", torch.device("cpu"))
