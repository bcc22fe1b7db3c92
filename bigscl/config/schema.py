"""Every setting of a run, with its default: strict, frozen, complete. `bigscl.config.reading` reads them."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from bigscl.bounds import Count, CountOrZero, NonNegative, Positive, Share
from bigscl.data.augment import ColorJitter, RandomColors, RandomErasing
from bigscl.data.transforms import EvaluationTransform, TrainingTransform
from bigscl.data.views import RandomCrop
from bigscl.method.objective import Objective
from bigscl.method.schedule import Phase, Schedule
from bigscl.store import Codec, StorageOptions

strict = ConfigDict(extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True, kw_only=True, config=strict)
class CropConfig:
    """Training views: torchvision's RandomResizedCrop, and mirroring."""

    scale: tuple[Positive, Positive] = (0.08, 1.0)
    """Least and largest share of the image's area."""
    ratio: tuple[Positive, Positive] = (3 / 4, 4 / 3)
    """Least and largest width / height."""
    flip: Share = 0.5
    """Share of the views that are mirrored left to right."""
    squash: bool = False
    """Draw the box on the image squashed to a square (COCO, VOC), not on the image as it is."""


@dataclass(frozen=True, kw_only=True, config=strict)
class ObservedConfig:
    """Observed labels drawn anew from the full ones, instead of those in the shards."""

    seed: CountOrZero
    """Another seed, another draw."""
    positives: Count = 1
    """Observed positives per image; images with fewer keep all."""
    negatives: CountOrZero = 0
    """Observed negatives per image."""


@dataclass(frozen=True, kw_only=True, config=strict)
class JitterConfig:
    """Colour jitter, as torchvision's."""

    brightness: NonNegative = 0.0
    contrast: NonNegative = 0.0
    saturation: NonNegative = 0.0
    hue: Annotated[float, Field(ge=0, le=0.5)] = 0.0


@dataclass(frozen=True, kw_only=True, config=strict)
class RandAugmentConfig:
    """RandAugment's operations that move no pixel."""

    num_operations: Count = 2
    magnitude: Annotated[int, Field(ge=0, le=30)] = 9


@dataclass(frozen=True, kw_only=True, config=strict)
class EraseConfig:
    """Random erasing; erased cells are left out of the heatmaps' averages."""

    probability: Share = 0.5
    scale: tuple[Positive, Positive] = (0.02, 0.33)


@dataclass(frozen=True, kw_only=True, config=strict)
class DataConfig:
    """Where the images come from and how they are looked at."""

    train: str
    """Training shards: a folder, a glob, a brace pattern, or URLs."""
    val: str | None = None
    """Fully labelled validation shards; none: no validation."""
    train_index: Path | None = None
    """Index of the training shards, if it is not beside them."""
    val_index: Path | None = None
    """Index of the validation shards, if it is not beside them."""
    labels: Literal["observed", "labels"] = "observed"
    """Which labels training may see; `labels` are the full ones (the oracle)."""
    observed: ObservedConfig | None = None
    """Draw the observed labels anew; none: those in the shards."""
    size: Annotated[int, Field(ge=16)] = 224
    """Side of the network's input in training."""
    eval_size: Annotated[int, Field(ge=16)] | None = None
    """Side of the network's input in evaluation; none: that of training."""
    batch_size: Count = 64
    """Images per process and step."""
    workers: CountOrZero = 4
    """Loader processes per training process."""
    shuffle_buffer: Count = 2000
    """Undecoded samples among which each loader process shuffles."""
    crop: CropConfig = CropConfig()
    """Training views."""
    color_jitter: JitterConfig | None = None
    """Colour jitter in training."""
    rand_augment: RandAugmentConfig | None = None
    """RandAugment's colour operations in training."""
    erase: EraseConfig | None = None
    """Random erasing in training."""
    resize: Literal["square", "shorter"] = "shorter"
    """Evaluation: the whole image squashed, or the centre after resizing the shorter side."""
    shorter: Count = 256
    """Length of the shorter side before the centre is cut out."""
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[Positive, Positive, Positive] = (0.229, 0.224, 0.225)
    """Images are (x / 255 - mean) / std."""
    max_bad_share: Share = 0.01
    """Share of an epoch's images that may be unreadable before the run stops."""
    allow_pipe: bool = False
    """Let `pipe:` URLs run commands."""

    def training_transform(self, seed: int, epoch: int) -> TrainingTransform:
        """How images are looked at in an epoch of training."""
        color: ColorJitter | RandomColors | None = None
        if self.color_jitter is not None:
            color = ColorJitter(**dataclasses.asdict(self.color_jitter))
        if self.rand_augment is not None:
            color = RandomColors(**dataclasses.asdict(self.rand_augment))
        return TrainingTransform(
            size=self.size,
            seed=seed,
            epoch=epoch,
            crop=RandomCrop(**dataclasses.asdict(self.crop)),
            color=color,
            erase=None if self.erase is None else RandomErasing(**dataclasses.asdict(self.erase)),
        )

    def evaluation_transform(self) -> EvaluationTransform:
        """How images are looked at in validation."""
        return EvaluationTransform(size=self.eval_size or self.size, resize=self.resize, shorter=self.shorter)


@dataclass(frozen=True, kw_only=True, config=strict)
class ModelConfig:
    """The network."""

    backbone: str
    """A torchvision name, `timm:<name>`, or `package.module:callable`."""
    weights: str | None = None
    """Published weights by name (IMAGENET1K_V2), or a .pt, .pth or .safetensors file."""
    pooling: Literal["logits", "probabilities"] = "logits"
    """What is averaged over cells; `probabilities` favours small objects and gives up the plain export."""
    freeze_stages: CountOrZero = 0
    """Stages of the backbone, from the image up, that are never trained."""
    freeze_statistics: bool = False
    """Batch normalisation uses the averages that came with the weights, where its own weights train too."""


@dataclass(frozen=True, kw_only=True, config=strict)
class SelectionConfig:
    """Expected positives, for en and ep; their number per image also for epr and role."""

    K: Positive | Literal["auto"] = "auto"
    """Expected positives per image; `auto`: the mean over the validation set."""
    start_epoch: Count = 1
    """First epoch in which they are used; before it only annotated positives count."""


@dataclass(frozen=True, kw_only=True, config=strict)
class StoreConfig:
    """The memory: running averages of scores and heatmaps for every training image."""

    kind: Literal["disk", "memory", "none"] = "disk"
    """`memory` lives and dies with the run; `none` only where the objective needs no memory."""
    url: str | None = None
    """Where it lives: a path or s3://bucket/prefix; none: `store` in the run folder."""
    momentum: Share = 0.8
    """mu of the running averages."""
    ema: Literal["plain", "debiased"] = "plain"
    """`debiased` forgets the initial 1 and 0 at the first look."""
    top: Count | None = None
    """Classes per image whose heatmaps are kept after `compact_after` epochs; none: all, for ever."""
    compact_after: Count | None = None
    """Epochs before the heatmaps are reduced to `top` classes; none: the warm-up's."""
    warmup_heatmaps: Literal["dense", "scores"] = "dense"
    """Until then: heatmaps of all classes, or scores only; for ever, where there is no `top`."""
    slots: Annotated[int, Field(ge=2)] = 3
    """Versions of each shard on disk; one less can be resumed from."""
    codec: Codec = "none"
    """none, blosc (lz4 with bitshuffle) or zstd."""
    checksum: bool = True
    """A CRC-32C with every chunk."""
    tracked: CountOrZero = 64
    """Samples whose every epoch is kept for pictures."""
    prefetch_batches: Count = 4
    """Batches whose rows are read ahead of the training step."""
    writeback_batches: Count = 4
    """Batches whose rows may wait to be written before the step waits."""
    io_threads: Count = 2
    """Threads that read and write shards."""
    resident_gb: Positive | None = None
    """Soft limit of the shards held in RAM per process; none: those that are open."""
    endpoint: str | None = None
    """Of an S3-compatible server; credentials come from the environment."""
    region: str | None = None
    anonymous: bool = False

    def options(self) -> StorageOptions:
        """How to reach an object store."""
        return StorageOptions(endpoint=self.endpoint, region=self.region, anonymous=self.anonymous)


@dataclass(frozen=True, kw_only=True, config=strict)
class PhaseConfig:
    """A stretch of epochs under one learning-rate curve."""

    epochs: CountOrZero
    learning_rate: Positive
    decay: Literal["constant", "cosine"] = "cosine"
    warmup_steps: CountOrZero = 0
    final_learning_rate: NonNegative = 0.0


@dataclass(frozen=True, kw_only=True, config=strict)
class ScheduleConfig:
    """Warm-up of the linear head over a frozen backbone, then the whole network."""

    warmup: PhaseConfig = PhaseConfig(epochs=5, learning_rate=1e-4, decay="constant")
    main: PhaseConfig = PhaseConfig(epochs=25, learning_rate=1e-5)


@dataclass(frozen=True, kw_only=True, config=strict)
class OptimizerConfig:
    """How the parameters are moved."""

    name: Literal["adam", "adamw", "sgd"] = "adam"
    weight_decay: NonNegative = 0.0
    momentum: Share = 0.9
    """Of sgd."""
    clip: Positive | None = None
    """Largest norm of the gradient."""
    accumulate: Count = 1
    """Batches per optimizer step."""


@dataclass(frozen=True, kw_only=True, config=strict)
class HardwareConfig:
    """What the machine can do for us."""

    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    channels_last: bool = False
    compile: bool = False
    sync_batchnorm: bool = False
    timeout_minutes: Positive = 10.0
    """How long a rank waits for the others before the run is given up."""


@dataclass(frozen=True, kw_only=True, config=strict)
class CheckpointConfig:
    """When the run is saved, and what is kept."""

    every_steps: Count | None = None
    """Also within epochs, every so many steps; none: at the end of each epoch only."""
    every_epochs: Count = 1
    """Save at the end of every so many epochs, and of the last."""
    keep: Count | None = None
    """Checkpoints to resume from: the newest, and ends of epochs before it; none: all that the slots hold."""


@dataclass(frozen=True, kw_only=True, config=strict)
class ValidationConfig:
    """Validation during training; the best epoch's weights are kept as `best`."""

    every_epochs: Count = 1
    metric: Literal["map", "top1"] = "map"
    """map: mean average precision over present classes; top1: share of images whose best class is right."""


@dataclass(frozen=True, kw_only=True, config=strict)
class LogConfig:
    """What is seen of a run."""

    every_steps: Count = 20
    trackers: tuple[str, ...] = ("tensorboard",)
    """Accelerate's trackers, by name."""
    pictures_every: CountOrZero = 1
    """Epochs between pictures of tracked samples with their heatmaps; 0: none."""
    pictures: Count = 6
    """Samples per picture."""
    ids: bool = False
    """Write the id of every trained sample to `ids-<rank>.txt`; for tests and forensics."""


@dataclass(frozen=True, kw_only=True, config=strict)
class Config:
    """A whole run."""

    run: Path
    """The run's folder: config, checkpoints, metrics, pictures, and the store unless it is elsewhere."""
    seed: CountOrZero = 0
    data: DataConfig
    model: ModelConfig
    objective: Objective = Objective()
    selection: SelectionConfig = SelectionConfig()
    store: StoreConfig = StoreConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    weight_ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Decay of an average of the weights, which is then validated and exported; none: the weights."""
    hardware: HardwareConfig = HardwareConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    validation: ValidationConfig = ValidationConfig()
    log: LogConfig = LogConfig()

    @property
    def store_url(self) -> str:
        """Where the store lives, if it is on disk."""
        return self.store.url or str(self.run / "store")

    @property
    def compact_after(self) -> int | None:
        """Epochs before the heatmaps are reduced to the top classes; None: never."""
        if self.store.kind == "none" or self.store.top is None:
            return None
        return self.store.compact_after or self.schedule.warmup.epochs

    @property
    def keep_checkpoints(self) -> int:
        """Checkpoints to resume from."""
        return self.checkpoint.keep or max(1, self.store.slots - self.spare_slots)

    @property
    def spare_slots(self) -> int:
        """Slots that no checkpoint may hold: one to write to, one for epochs that end without one."""
        return 1 if self.checkpoint.every_epochs == 1 else 2

    def phases(self) -> Schedule:
        """The phases of the run."""
        warmup, main = dataclasses.asdict(self.schedule.warmup), dataclasses.asdict(self.schedule.main)
        return Schedule((Phase(name="warmup", trains="head", **warmup), Phase(name="main", **main)))
