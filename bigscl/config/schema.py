"""Every setting of a run. Values that belong to a module of the method or the data are defined there.

`bigscl.config.load` reads and checks them. Importing this module imports no torch.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from bigscl.common.bounds import Count, CountOrZero, NonNegative, Positive, Share
from bigscl.config.schedule import Schedule
from bigscl.data.augmentation import ColorJitter, Mixing, RandomColors
from bigscl.data.crops import RandomCrop, RandomErasing
from bigscl.data.labels.training_labels import GivenConfig
from bigscl.data.transforms import (
    MEAN,
    STD,
    DecoderName,
    EvaluationTransform,
    Interpolation,
    Resize,
    TrainingTransform,
    shorter_side,
)
from bigscl.losses.objective import Objective
from bigscl.store import Codec, StorageOptions

RankBy = Literal["score", "spatial"]
Tracker = Literal[
    "tensorboard", "wandb", "mlflow", "comet_ml", "clearml", "aim", "dvclive", "swanlab", "trackio"
]
# A batch of one image of this side takes 0.8 GB; a larger one is a mistake.
LARGEST_SIDE = 8192
ProjectName = Annotated[str, Field(min_length=1, max_length=128)]
MANY_CLASSES = 4000
"""With more of them an image takes more bytes for scores than for ten heatmaps."""
FEW_SCORES = 64
"""Scores that are kept of each image then."""
Side = Annotated[int, Field(ge=16, le=LARGEST_SIDE)]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    train: str
    """Training shards: a folder, a glob, a brace pattern, or URLs."""
    val: str | None = None
    """Fully labelled validation shards. Default: no validation."""
    train_index: Path | None = None
    """Index of the training shards. Default: the one in their folder."""
    val_index: Path | None = None
    """Index of the validation shards. Default: the one in their folder."""
    labels_file: Path | None = None
    """Labels of training images in place of those in the shards: .csv, .jsonl, .parquet, ReaL's .json, or
    MultiLabel-ImageNet's .txt."""
    answers: Path | None = None
    """File of human answers (`bigscl review`); it may grow. yes = positive, no = negative."""
    val_labels_file: Path | None = None
    """Full labels of the validation images; images that it lacks are not evaluated."""
    labels: Literal["given", "full"] = "given"
    """Labels that training sees: the given ones, or the full ones (the oracle)."""
    given: GivenConfig | None = None
    """Draw the given labels from the full ones. Default: use those in the shards."""
    canaries: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    """Share of the images of which a given label is hidden from training, to estimate how many of the mined
    labels are right (0.02, and at least 100 images)."""
    preprocessing: Literal["explicit", "weights"] = "explicit"
    """`weights`: settings of size, resizing, colours that are not given here are those of `model.weights`."""
    size: Side = 224
    """Side of the network's input in training."""
    eval_size: Side | None = None
    """Side of the network's input in evaluation. Default: as in training."""
    batch_size: Count = 64
    """Images per process and step."""
    workers: CountOrZero = 4
    """Loader processes per training process."""
    decoder: DecoderName = "torchvision"
    """Decoder of images. `nvimgcodec` (extra `fast-input`) decodes only the part of a JPEG that is seen."""
    shuffle_buffer: Count = 2000
    """Undecoded samples among which each loader process shuffles."""
    crop: RandomCrop = field(default_factory=RandomCrop)
    """Training views."""
    color_jitter: ColorJitter | None = None
    """Colour jitter in training."""
    rand_augment: RandomColors | None = None
    """RandAugment's colour operations in training."""
    erase: RandomErasing | None = None
    """Random erasing in training."""
    mix: Mixing | None = None
    """Mixup and CutMix in training."""
    interpolation: Interpolation = "bilinear"
    """How images are resized, in training and evaluation."""
    resize: Resize = "shorter"
    """Evaluation: squash the whole image to a square, or resize the shorter side and cut out the centre."""
    shorter: Annotated[int, Field(ge=1, le=2 * LARGEST_SIDE)] | None = None
    """Length of the shorter side before the centre is cut out. Default: 256/224 of the evaluated size."""
    mean: tuple[float, float, float] = MEAN
    """Mean of each colour channel, in 0 to 1; it is subtracted from the images."""
    std: tuple[Positive, Positive, Positive] = STD
    """Standard deviation of each colour channel; the images are divided by it."""
    max_bad_share: Share = 0.01
    """Tolerated share of unreadable images in an epoch; the run stops beyond it."""
    allow_pipe: bool = False
    """Allow `pipe:` URLs, which run commands."""

    def __post_init__(self) -> None:
        if self.shorter is None:
            # Resolved here, so that the saved config has the number. Squares do not use it.
            size = 224 if self.resize == "square" else self.eval_size or self.size
            object.__setattr__(self, "shorter", shorter_side(size))

    def training_transform(self, seed: int, epoch: int) -> TrainingTransform:
        return TrainingTransform(
            size=self.size,
            seed=seed,
            epoch=epoch,
            crop=self.crop,
            color=self.color_jitter or self.rand_augment,
            erase=self.erase,
            interpolation=self.interpolation,
        )

    def evaluation_transform(self) -> EvaluationTransform:
        assert self.shorter is not None
        return EvaluationTransform(
            size=self.eval_size or self.size,
            resize=self.resize,
            shorter=self.shorter,
            interpolation=self.interpolation,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    backbone: str
    """A torchvision name, `timm:<name>`, or `package.module:callable`."""
    weights: str | None = None
    """Published weights by name (IMAGENET1K_V2), or a .pt, .pth or .safetensors file. Default: random."""
    args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the network, as its library or callable takes them (`drop_path_rate: 0.1`)."""
    freeze_stages: CountOrZero = 0
    """Number of stages of the backbone, from the image on, that are never trained."""
    freeze_statistics: bool = False
    """Batch normalisation keeps the statistics that came with the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionConfig:
    """Expected positives, for losses that need them or their number per image."""

    K: Annotated[float, Field(ge=1)] | Literal["auto"] = "auto"
    """Number of positives per image; `auto`: the mean over a fully labelled data.val."""
    start_epoch: Count = 1
    """First epoch in which expected positives are used; before it only given positives count."""
    by: RankBy = "score"
    """Value that ranks images: the score in the memory (the paper), or score and heatmap (spatial)."""
    per_class: bool | Literal["labelled"] = False
    """Give each class its own K, with the mean K over the labels: from the memory (`true`; assumes labels
    drawn uniformly from an image's classes), or from a data.val with full labels (`labelled`)."""
    pseudo_positive_share: Share = 0.5
    """Share of the expected positives (not given, highest scores first) that `enp` counts as positives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """The memory: running averages of scores and heatmaps for every training image."""

    kind: Literal["disk", "ram", "none"] = "disk"
    """Where it is kept: `ram` ends with the run; `none` is for objectives that need no memory."""
    url: str | None = None
    """A path, or s3://bucket/prefix (or gs://, az://). Default: `store` in the run folder."""
    momentum: Share = 0.8
    """Momentum mu of the running averages."""
    ema: Literal["plain", "debiased"] = "plain"
    """`debiased`: the first visit replaces the initial 1 and 0."""
    top: Count | None = None
    """Classes per image whose heatmaps are kept after `compact_after` epochs. Default: all."""
    compact_after: Count | None = None
    """Epochs before the heatmaps are reduced to `top` classes. Default: those of the warm-up."""
    warmup_heatmaps: Literal["dense", "scores"] = "dense"
    """Kept before that: heatmaps of all classes, or scores only. Without `top`: in all epochs."""
    top_scores: Count | None = None
    """Classes per image whose scores are kept, the highest; the others share a floor. Needs `warmup_heatmaps:
    scores`. Default: all of up to 4,000 classes, or beside heatmaps of all; 64 of more."""
    slots: Annotated[int, Field(ge=2)] = 3
    """Versions of each shard on disk; the run can resume from one less."""
    codec: Codec = "none"
    """Compression: none, blosc (lz4, bitshuffle), zstd, or uint8: heatmaps rounded to a byte, zstd."""
    checksum: bool = True
    """Store a CRC-32C with every chunk."""
    history_samples: CountOrZero = 64
    """Samples whose heatmaps of every epoch are kept for plots."""
    prefetch_batches: Count = 4
    """Number of batches whose rows are read ahead of the training step."""
    writeback_batches: Count = 4
    """Number of batches whose rows may be queued for writing before the step waits."""
    io_threads: Count = 2
    """Threads that read and write shards."""
    resident_gb: Positive | None = None
    """Soft limit of the shards held in RAM per process. Default: all open shards."""
    endpoint: str | None = None
    """Address of an S3-compatible server; credentials come from the environment."""
    region: str | None = None
    """Region of the bucket."""
    anonymous: bool = False
    """Access a public bucket without credentials."""

    def kept_scores(self, num_classes: int) -> int | None:
        """Return how many scores of an image are kept; None for all."""
        kept = self.top_scores
        if kept is None and num_classes > MANY_CLASSES and self.warmup_heatmaps == "scores":
            kept = FEW_SCORES
        return None if kept is None or kept >= num_classes else kept

    def options(self) -> StorageOptions:
        return StorageOptions(endpoint=self.endpoint, region=self.region, anonymous=self.anonymous)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    name: Literal["adam", "adamw", "lamb", "sgd"] = "adam"
    """Algorithm."""
    weight_decay: NonNegative = 0.0
    """Weight decay, of all trained parameters."""
    decay_norms_and_biases: bool = True
    """Whether normalisation layers and biases, all that has one dimension, have the weight decay too."""
    layer_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Factor of the learning rate of each stage to that of the next; the linear head has the full rate."""
    fused: bool = False
    """Update all parameters of adam and adamw by one GPU operation."""
    momentum: Share = 0.9
    """Momentum of sgd."""
    clip: Positive | None = None
    """Largest norm of the gradient. Default: no limit."""
    accumulate: Count = 1
    """Number of batches per optimizer step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareConfig:
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Precision of the network's arithmetic; losses and memory are computed in fp32."""
    channels_last: bool = False
    """Keep images and weights in channels-last order, which is faster on GPUs."""
    compile: bool = False
    """Compile the network with torch.compile."""
    sync_batchnorm: bool = False
    """Compute the statistics of batch normalisation over the batches of all processes."""
    deterministic: bool = False
    """Use only GPU operations that give the same bits every time, which is slower. CPUs always do."""
    timeout_minutes: Positive = 10.0
    """Minutes that a process waits for the others before the run fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """When the run is saved, and how many checkpoints are kept."""

    every_steps: Count | None = None
    """Also save every so many steps within an epoch. Default: at the end of epochs only."""
    every_minutes: Positive | None = None
    """Also save within an epoch when so many minutes have passed since the last save."""
    every_epochs: Count = 1
    """Save at the end of every so many epochs, and of the last."""
    keep: Count | None = None
    """Number of checkpoints to resume from. Default: as many as the slots hold."""
    background: bool = True
    """Write checkpoints from a copy in host memory while training goes on; false: training waits for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationConfig:
    """Validation during training; the best epoch's weights are kept as `best`."""

    every_epochs: Count = 1
    """Validate at the end of every so many epochs."""
    metric: Literal["map", "top1"] = "map"
    """Decides which epoch is the best: mean average precision over present classes, or top-1 accuracy."""
    pooling: Literal["plain", "map"] = "plain"
    """Of the metric that decides: as the network pools, or map pooling. Both are logged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    every_steps: Count = 20
    """Log the losses every so many steps."""
    trackers: tuple[Tracker, ...] = ("tensorboard",)
    """Where metrics go besides metrics.jsonl; each must be installed."""
    project: ProjectName = "bigscl"
    """Project (MLflow: experiment) that trackers file the run under."""
    name: ProjectName | None = None
    """Name of the run in trackers. Default: that of its folder."""
    pictures_every: CountOrZero = 1
    """Plot tracked samples with their heatmaps every so many epochs; 0: never."""
    pictures: Count = 6
    """Samples per plot."""
    score_classes: CountOrZero = 10
    """Classes per image whose scores of each epoch are kept for `review list`, 4 bytes each; 0: none. At
    most `store.top_scores`."""
    ids: bool = False
    """Write the id of every trained sample to `ids-<rank>.txt`, for debugging."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A whole run."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", allow_inf_nan=False)
    """Holds for all sections too."""

    run: Path
    """Folder of the run: config, checkpoints, metrics, plots, and the store if `store.url` is not set."""
    seed: CountOrZero = 0
    """Seed of the weights, the order of the samples, the views and the colours."""
    data: DataConfig
    """Where the images come from and how they are transformed."""
    model: ModelConfig
    """The network."""
    objective: Objective = field(default_factory=Objective)
    """The loss."""
    selection: SelectionConfig = SelectionConfig()
    """Expected positives."""
    store: StoreConfig = StoreConfig()
    """The memory."""
    schedule: Schedule = field(default_factory=Schedule)
    """Epochs and learning rates."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer."""
    weight_ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Decay of a running average of the weights, which is validated and exported in their place."""
    hardware: HardwareConfig = HardwareConfig()
    """Precision, speed and processes."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When the run is saved."""
    validation: ValidationConfig = ValidationConfig()
    """Validation during training."""
    log: LogConfig = LogConfig()
    """The log."""

    @property
    def store_url(self) -> str:
        return self.store.url or str(self.run / "store")

    @property
    def compact_after(self) -> int | None:
        """Epochs before the heatmaps are reduced to the top classes; None: never."""
        if self.store.kind == "none" or self.store.top is None:
            return None
        return self.store.compact_after or self.schedule.warmup.epochs

    @property
    def keep_checkpoints(self) -> int:
        return self.checkpoint.keep or max(1, self.store.slots - self.spare_slots)

    @property
    def spare_slots(self) -> int:
        """Slots that no checkpoint may hold: one to write to, and one if some epochs end without one."""
        return 1 if self.checkpoint.every_epochs == 1 else 2
