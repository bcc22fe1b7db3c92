"""What a rehearsal trains: one short epoch of each kind that a run has."""

from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from bigscl.config import CheckpointConfig, Config
from bigscl.data.plan import Plan, Stream, batch_lengths

NEVER = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Epochs of a run that cost the same: the same parameters train, and the store has the same layout."""

    epochs: range
    is_warmup: bool
    is_compacted: bool
    """Whether the heatmaps are those of the top classes only."""


def kinds_of_epochs(config: Config) -> list[Kind]:
    """Return the kinds of epochs of a run, in their order."""
    compact_after = config.compact_after or NEVER
    bounds = {0, config.schedule.warmup.epochs, compact_after, config.schedule.epochs}
    edges = sorted(edge for edge in bounds if edge <= config.schedule.epochs)
    return [
        Kind(
            epochs=range(first, last),
            is_warmup=config.schedule.is_warmup(first),
            is_compacted=first >= compact_after,
        )
        for first, last in pairwise(edges)
    ]


def rehearsal_config(config: Config, folder: Path, place: str | None) -> Config:
    """Return the config of the rehearsal: an epoch of each kind, saved but neither validated nor tracked.

    `place` is where its store goes, if that is not in the folder.
    """
    kinds = kinds_of_epochs(config)
    num_warmup = sum(kind.is_warmup for kind in kinds)
    num_first_layout = sum(not kind.is_compacted for kind in kinds)
    schedule, compacts = config.schedule, config.store.top is not None
    return replace(
        config,
        run=folder,
        schedule=replace(
            schedule,
            warmup=replace(schedule.warmup, epochs=num_warmup),
            main=replace(schedule.main, epochs=len(kinds) - num_warmup),
        ),
        store=replace(
            config.store,
            url=None if place is None else f"{place}/store",
            compact_after=num_first_layout if compacts else None,
        ),
        selection=replace(config.selection, start_epoch=1),
        checkpoint=CheckpointConfig(background=config.checkpoint.background),
        validation=replace(config.validation, every_epochs=NEVER),
        log=replace(config.log, trackers=(), pictures_every=0, ids=False),
    )


def first_batches(plan: Plan, count: int, rows_per_shard: int) -> Plan:
    """Return the plan with at most the first `count` batches of each rank."""

    def cut(stream: Stream, batches: int) -> Stream:
        ids = stream.ids[: sum(batch_lengths(len(stream.ids), plan.batch_size)[: max(0, batches)])]
        return Stream(shards=stream.shards[np.isin(stream.shards, ids // rows_per_shard)], ids=ids)

    def cut_all(streams: tuple[Stream, ...]) -> tuple[Stream, ...]:
        # Streams take turns: the first one may have a batch more than the last.
        return tuple(cut(stream, -(-(count - turn) // len(streams))) for turn, stream in enumerate(streams))

    return replace(plan, streams=tuple(cut_all(streams) for streams in plan.streams))
