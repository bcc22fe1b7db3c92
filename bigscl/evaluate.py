"""Evaluate a network on shards with any number of processes: every image once, the same report.

`python -m bigscl.evaluate --help` shows the options and examples.
"""

import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState

from bigscl.common.command_line import make_command, rank_of_this_process, run
from bigscl.common.files import existing_folder
from bigscl.common.user_error import UserError
from bigscl.config import Config
from bigscl.data.epoch_plan import evaluation_plan
from bigscl.data.index import Index, load_index
from bigscl.data.labels.label_files import with_evaluation_labels
from bigscl.data.labels.real_labels import (
    image_numbers,
    match_real_labels,
    read_real_labels,
    read_reviewed_labels,
)
from bigscl.data.loader import BadSamples, Batch, Loader
from bigscl.distributed.ranks import choose_interface, process_group
from bigscl.evaluation.evaluate_options import SEVERAL, EvaluationOptions
from bigscl.evaluation.inference import Predictions, predict
from bigscl.evaluation.localization import (
    NETWORK,
    STORED,
    Pointing,
    map_trials,
    pointing,
    read_objects,
    summarize,
)
from bigscl.evaluation.memory_figures import memory_offset
from bigscl.evaluation.predictions import FILE_NAME, SavedPredictions, from_network
from bigscl.evaluation.report import make_report
from bigscl.evaluation.report_files import summary, to_json, write_report
from bigscl.evaluation.target import EvaluationTarget, build_network, find_target, with_overrides
from bigscl.models.spatial import SpatialClassifier
from bigscl.store import StoreError
from bigscl.training.metrics_log import start_logging
from bigscl.training.run_folder import open_data, read_store

logger = logging.getLogger(__name__)
SECONDS_BETWEEN_LINES = 10.0


def evaluate(options: EvaluationOptions) -> None:
    """Predict every image and write the report."""
    start_logging(rank_of_this_process())
    _evaluate(options)
    # Not after an error: then it would wait for ranks that wait for this one.
    if dist.is_initialized():
        dist.destroy_process_group()


def _evaluate(options: EvaluationOptions) -> None:
    target = with_overrides(find_target(options.model, options.backbone, options.weights), options)
    index = _open_index(target, options)
    real_labels = None if options.real is None else read_real_labels(options.real)
    if real_labels is not None:
        # Fail now, not after hours of predictions.
        match_real_labels(
            real_labels, [index.key(int(sample_id)) for sample_id in index.ids()], index.class_names
        )
    reviewed = None
    if options.reviewed is not None:
        reviewed = read_reviewed_labels(options.reviewed, index.class_names)
        image_numbers([index.key(int(sample_id)) for sample_id in index.ids()])
    folder = options.output or (target.config.run if target.config else Path()) / "evaluation"
    check_writable(folder)
    saved = Evaluation(target, index, options).predictions()
    if saved is None:
        return
    report = make_report(
        saved,
        real_labels=real_labels,
        reviewed_labels=reviewed,
        activation=options.activation,
        pooling=options.pooling,
    )
    saved.save(folder / FILE_NAME)
    write_report(report, folder)
    print(json.dumps(to_json(report)) if options.json else summary(report))
    logger.info("report: %s", folder / "report.md")


def check_writable(folder: Path) -> None:
    """Refuse an output folder that cannot be written to: now, not after hours of predictions."""
    place = existing_folder(folder)
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        what = "a file" if place.is_file() else "not writable"
        raise UserError(f"--output {folder}: {place} is {what}. Choose a folder that can be written to.")


class Evaluation:
    """The evaluation of a network on the images of an index; every process has one."""

    def __init__(self, target: EvaluationTarget, index: Index, options: EvaluationOptions) -> None:
        self._target, self._index, self._options = target, index, options
        # Requests that cannot be met fail here, not after hours of predictions.
        self._objects = read_objects(index, index.ids()) if options.boxes else None
        if options.heatmaps and (target.config is None or target.config.store.kind != "disk"):
            raise UserError("--heatmaps: needs a run that keeps its heatmaps on disk (store.kind: disk)")
        choose_interface()
        state = PartialState()
        self._device = state.device
        self._ranks = process_group()
        if self._device.type == "cpu":
            # The number of threads would change the last bits of sums. Use more processes for speed.
            torch.set_num_threads(1)
        # Published weights are downloaded once.
        with state.main_process_first():
            self._network: SpatialClassifier = build_network(target, index.num_classes).to(self._device)
        logger.info(
            "%s on %d images, %d processes on %s",
            *(target.name, index.num_samples, self._ranks.world_size, self._device.type),
        )
        logger.info("preprocessing: %s", target.describe_preprocessing())

    def predictions(self) -> SavedPredictions | None:
        """Return the predictions of all images on rank 0, None elsewhere."""
        objects = self._objects
        found = predict(
            self._network,
            self._batches(),
            self._device,
            mean=self._target.mean,
            std=self._target.std,
            transport=self._ranks,
            measure=None if objects is None else partial(map_trials, objects),
        )
        if found is None:
            return None
        about: dict[str, Any] = {"model": self._target.name, "shards": _names(self._index)}
        file = self._options.labels_file or (
            None
            if self._options.shards or self._target.config is None
            else self._target.config.data.val_labels_file
        )
        about["labels_file"] = None if file is None else str(file)
        about["preprocessing"] = self._target.describe_preprocessing()
        if (offset := _offset_of(self._target.config)) is not None:
            about["offset"] = offset
        if localization := self._localization(found):
            about["localization"] = {
                source: {kind: asdict(figures) for kind, figures in kinds.items()}
                for source, kinds in localization.items()
            }
        return from_network(found, self._index, about)

    def _localization(self, found: Predictions) -> dict[str, dict[str, Pointing]]:
        """Return the requested localization figures, by source of the heat."""
        localization = {}
        if self._objects is not None:
            localization[NETWORK] = summarize(found.measured, self._index)
        if self._options.heatmaps:
            assert self._target.config is not None
            localization[STORED] = _stored_pointing(self._target.config)
        return localization

    def _batches(self) -> Iterator[Batch]:
        """Yield the batches of this rank; log the progress of rank 0."""
        options, index, ranks = self._options, self._index, self._ranks
        plan = evaluation_plan(
            index.shard_sizes,
            index.rows_per_shard,
            batch_size=options.batch_size,
            world_size=ranks.world_size,
            workers=options.workers,
        )
        bad = BadSamples(index, plan.num_samples(ranks.rank), max_share=options.max_bad_share)
        pin = self._device.type == "cuda"
        loader = Loader(index, plan, ranks.rank, self._target.transform, bad=bad, pin_memory=pin)
        said = time.monotonic()
        for number, batch in enumerate(loader):
            if time.monotonic() - said >= SECONDS_BETWEEN_LINES:
                said = time.monotonic()
                logger.info("batch %d of %d of this process", number, len(loader))
            yield batch


def _open_index(target: EvaluationTarget, options: EvaluationOptions) -> Index:
    """Load the index of the given shards, or of the run's validation shards."""
    if options.shards:
        index = load_index(options.shards, options.index, allow_pipe=options.allow_pipe)
        return _with_labels(index, options.labels_file)
    data = None if target.config is None else target.config.data
    if data is None or data.val is None:
        raise UserError("--shards: missing. Give the shards, or a run that has validation shards.")
    index = load_index(data.val, options.index or data.val_index, allow_pipe=options.allow_pipe)
    return _with_labels(index, options.labels_file or data.val_labels_file)


def _with_labels(index: Index, file: Path | None) -> Index:
    return index if file is None else with_evaluation_labels(index, file)


def _offset_of(config: Config | None) -> float | None:
    """Return the offset of the logits that the memory of a run suggests; None, with a line, without one."""
    if config is None:
        return None
    try:
        offset = memory_offset(config)
    except (UserError, StoreError, OSError) as error:
        logger.info("%s", error)
        return None
    logger.info("offset that the memory suggests: %s", offset)
    return offset.value


def _stored_pointing(config: Config) -> dict[str, Pointing]:
    """Return the figures of the run's training images at the newest snapshot of its store."""
    data = open_data(config)
    with read_store(config, data.labelled) as store:
        return pointing(store, data.train)


def _names(index: Index) -> str:
    first, last = index.urls[0], index.shard_names[-1]
    return first if len(index.urls) == 1 else f"{len(index.urls)} shards, {first} to {last}"


def main(arguments: list[str]) -> int:
    """Return the exit code: 0 when the report is written, 2 after the user's mistake."""
    return run(make_command(evaluate, "evaluate", SEVERAL), arguments, "bigscl.evaluate")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
