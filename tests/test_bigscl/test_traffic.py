"""Which values travel between host and GPU in a step, and which of them make the host wait.

The real step runs on fake CUDA tensors: shapes, devices and copies are computed, no GPU is needed. A copy
that does not say `non_blocking`, or a value that is read back (`.item()`), is a hidden synchronisation.
"""

import contextlib
from collections import Counter
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from bigscl.data import loader as batches
from bigscl.distributed.ranks import SingleProcess
from bigscl.losses.objective import BASES
from bigscl.losses.role import LabelEstimator
from bigscl.losses.state import SampleRows
from bigscl.memory.lookup import CheckedViews, GivenClasses, to_device, updated_averages
from bigscl.models.spatial import WeightAverage, build_model
from bigscl.selection.thresholds import Thresholds
from bigscl.store import Rows
from bigscl.training.model_state import make_loss_state
from bigscl.training.step import Step
from tests.builders import config_of, make_batch
from tests.test_store.conftest import make_annotations

CUDA = torch.device("cuda", 0)
NUM_CLASSES, TOP, SIDE, SIZE = 7, 3, 12, 48
BATCH = 4
# Of each batch: images, labels, views and ids.
OF_THE_BATCH = 4
LAYOUTS = {"scores": 0, "dense": 3, "topk": 4}
"""Arrays in addition to scores and visits: heatmaps, counts and ranking; with topk also classes."""
READS_BACK = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal")


def fakes_cuda() -> bool:
    """Whether fake tensors need no GPU: with torch 2.4 an index asks for one."""
    with FakeTensorMode():
        try:
            torch.zeros(1, device=CUDA)[:, None]
        except (RuntimeError, AssertionError):
            return False
    return True


pytestmark = pytest.mark.skipif(
    not fakes_cuda(), reason="this version of torch needs a GPU for fake CUDA tensors"
)


class Traffic(TorchDispatchMode):
    """Counts copies between devices, and values that the host waits for."""

    def __init__(self):
        super().__init__()
        self.copies = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if name in ("_to_copy", "copy_"):
            target = result if name == "_to_copy" else args[0]
            source = args[0] if name == "_to_copy" else args[1]
            waits = not ((kwargs or {}).get("non_blocking") or (len(args) > 2 and args[2]))
            if isinstance(source, torch.Tensor) and source.device.type != target.device.type:
                way = f"{source.device.type} to {target.device.type}"
                self.copies[f"{way}, blocking" if waits else way] += 1
        elif name in READS_BACK and any(
            isinstance(each, torch.Tensor) and each.device.type == "cuda" for each in args
        ):
            self.copies[f"{name}, blocking"] += 1
        return result


class FakeAccelerator:
    """What a step uses of Accelerate, on one rank."""

    device, scaler = CUDA, None

    def __init__(self, dtype):
        self._dtype = dtype

    def backward(self, loss):
        """Autograd's engine asks for a real GPU; its kernels copy nothing to the host."""

    def reduce(self, values, reduction):
        return values

    def gather(self, values):
        return values.repeat(2)

    @contextlib.contextmanager
    def autocast(self):
        """As torch.autocast, which does nothing where there is no GPU."""
        torch.set_autocast_enabled("cuda", self._dtype is not torch.float32)
        torch.set_autocast_dtype("cuda", self._dtype)
        try:
            yield
        finally:
            torch.set_autocast_enabled("cuda", False)
            torch.clear_autocast_cache()


class Estimator(LabelEstimator):
    """Estimates whose gradient is there without a backward pass."""

    def of(self, ids, device):
        estimates = super().of(ids, device)
        estimates.grad = torch.zeros_like(estimates)
        return estimates


class FakeEvent:
    """An event of a GPU; waiting for it before the next step would be a synchronisation."""

    def __init__(self, blocking):
        assert blocking, "its thread would keep a core busy"

    def record(self):
        pass

    def synchronize(self):
        pass


def move_to_fake_gpu(model):
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                fake = torch.empty(parameter.shape, device=CUDA)
                module._parameters[name] = torch.nn.Parameter(fake, requires_grad=parameter.requires_grad)
        for name, buffer in module._buffers.items():
            module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=CUDA)


def make_rows(layout):
    heatmaps = {"scores": None, "dense": NUM_CLASSES, "topk": TOP}[layout]
    arrays = {
        "scores": np.zeros((BATCH, NUM_CLASSES), np.float16),
        "last_epoch": np.zeros(BATCH, np.int32),
        "sample_visits": np.zeros(BATCH, np.uint8),
    }
    if heatmaps is not None:
        arrays["heatmaps"] = np.zeros((BATCH, heatmaps, SIDE, SIDE), np.float16)
        arrays["cell_visits"] = np.zeros((BATCH, SIDE, SIDE), np.uint8)
        arrays["spatial_score"] = np.zeros((BATCH, heatmaps), np.float16)
    if layout == "topk":
        arrays["classes"] = np.tile(np.arange(TOP, dtype=np.uint16), (BATCH, 1))
    return Rows(**arrays)


def copies_of_a_step(base, consistency, layout, dtype=torch.float32, ranks=None, mix=None):
    """The copies of the second step of a run: what is made once is made by then."""
    config = config_of(
        data={"size": SIZE} | ({} if mix is None else {"mix": {"mixup": 1.0}}),
        objective={"base": base, "consistency": consistency},
    )
    annotations = make_annotations((BATCH,), NUM_CLASSES)
    data = SimpleNamespace(positives_per_image=2.0, annotations=annotations)
    estimator = Estimator(annotations, 0) if base == "role" else None
    batches._factor_and_offset.cache_clear()
    model = build_model("bigscl.models.smallnet:small_resnet", NUM_CLASSES).train()
    with FakeTensorMode(allow_non_fake_inputs=True):
        move_to_fake_gpu(model)
        accelerator = FakeAccelerator(dtype)
        kept = estimator or make_loss_state(config, annotations, CUDA, 0)
        state = SimpleNamespace(model=model, loss_state=kept, accelerator=accelerator, optimizer=None)
        none = Thresholds.none(NUM_CLASSES)
        selection = replace(none, pseudo_positives=none).to(CUDA)
        annotated = GivenClasses(make_annotations(), CUDA)
        memory = SimpleNamespace(keeps_heatmaps=layout != "scores")
        step = Step(config, data, state, memory, ranks or SingleProcess())
        step.epoch = 1
        for _ in range(2):
            with Traffic() as traffic, accelerator.autocast():
                images = torch.zeros(BATCH, 3, SIZE, SIZE, dtype=torch.uint8)
                labels = torch.full((BATCH, NUM_CLASSES), -1, dtype=torch.int8)
                erased = None if mix is None else torch.zeros(BATCH, 4)
                batch = make_batch(range(BATCH), images, labels, mix=mix, erased=erased)
                sample_views = CheckedViews(rows=np.arange(BATCH), views=batch.views, erased=batch.erased)
                stored = to_device(
                    make_rows(layout), sample_views, selection, annotated, device=CUDA, momentum=0.8
                )
                _, predicted = step(batch, stored, count=BATCH, gamma=1.0, rate=0.1)
                updated_averages(stored, predicted.logits, predicted.maps, config.store)
    batches._factor_and_offset.cache_clear()
    return traffic.copies


TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@pytest.mark.parametrize(
    ("base", "consistency", "layout", "kind"),
    [
        # The parts of a loss are added up: each base is tried once, and all else with one base.
        *((base, "scl", "topk", "bf16") for base in sorted(set(BASES) - {"role", "ll_cp", "en"})),
        *product(["en"], ["none", "cl", "scl"], LAYOUTS, ["bf16"]),
        ("en", "scl", "topk", "fp32"),
    ],
)
def test_a_step_copies_its_batch_and_its_rows_and_waits_for_nothing(base, consistency, layout, kind):
    copies = copies_of_a_step(base, consistency, layout, TYPES[kind])
    rows = 2 + LAYOUTS[layout]
    assert copies == {"cpu to cuda": OF_THE_BATCH + rows}


@pytest.mark.parametrize("layout", ["dense", "topk"])
def test_a_corrected_target_needs_no_copies_of_its_own(layout):
    assert copies_of_a_step("en", "scl_corrected", layout) == copies_of_a_step("en", "scl", layout)


@pytest.mark.parametrize("consistency", ["cl", "scl", "scl_corrected"])
@pytest.mark.parametrize("layout", ["dense", "topk"])
def test_mixed_images_need_a_copy_of_their_mix_and_one_of_the_boxes(consistency, layout):
    mixed = copies_of_a_step("en", consistency, layout, mix=torch.zeros(BATCH, 5))
    assert mixed == {"cpu to cuda": copies_of_a_step("en", consistency, layout)["cpu to cuda"] + 2}


@pytest.mark.parametrize("base", ["epr", "ll_r", "ll_ct", "crisp"])
def test_statistics_of_the_global_batch_stay_on_the_devices(base):
    two = SimpleNamespace(rank=0, world_size=2)
    copies = copies_of_a_step(base, "none", "scores", ranks=two)
    assert copies == copies_of_a_step("an", "none", "scores")


@pytest.mark.parametrize("base", ["role", "ll_cp"])
def test_losses_that_keep_rows_wait_for_nothing_either(base, monkeypatch):
    """The rows live on the host: they go up, and a gradient or new bits come down one step later."""
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    # The update itself is made on the host, with values that fake tensors do not have.
    monkeypatch.setattr(SampleRows, "_finish", lambda self: None)
    copies = copies_of_a_step(base, "none", "scores")
    without = copies_of_a_step("an", "none", "scores")
    assert copies == {"cpu to cuda": without["cpu to cuda"] + 1, "cuda to cpu": 1}


def test_average_of_the_weights_waits_for_nothing():
    model = build_model("bigscl.models.smallnet:small_resnet", NUM_CLASSES)
    average = WeightAverage(model, 0.9)
    with FakeTensorMode(allow_non_fake_inputs=True):
        move_to_fake_gpu(model)
        move_to_fake_gpu(average)
        average._has_begun = True  # read once in a run
        with Traffic() as traffic:
            average.update_parameters(model)
    assert traffic.copies == {}
