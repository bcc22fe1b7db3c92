"""Stages for other people's pipelines: ids of samples, and random crops that return their views."""

import re
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bigscl.common.text import printable
from bigscl.common.url_secrets import public
from bigscl.common.user_error import UserError
from bigscl.data.crops import View
from bigscl.data.index import Index

if TYPE_CHECKING:
    from torch import Tensor

# Shards whose keys are held at a time; a shuffle buffer mixes the samples of a few.
MOST_SHARDS = 256
TAR_NAME = re.compile(r"[^/\s:='\"|]+\.(?:tar\.gz|tar|tgz)")


class UnknownSample(UserError):
    """A pipeline yields a sample that is not in the index."""


class SampleIds:
    """Adds `__id__` to each sample, by its `__url__` and `__key__`: `dataset.map(bigscl.SampleIds(index))`.

    Like other names with underscores, it passes webdataset's `decode` unchanged. The shards may lie in
    another folder or come through a pipe: their names decide. A sample that the index lacks raises
    UnknownSample; with webdataset's `handler=wds.warn_and_continue` it is left out.
    """

    def __init__(self, index: Index, field: str = "__id__") -> None:
        self._index, self._field = index, field
        self._shards: dict[str, int] = {}
        self._places: OrderedDict[int, dict[bytes, int]] = OrderedDict()

    def __call__(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        for name in ("__url__", "__key__"):
            if not isinstance(sample.get(name), str):
                raise UserError(
                    f"sample: has no {name}, found {sorted(map(str, sample))[:10]}. Put SampleIds before the "
                    f"stages that drop it (to_tuple, rename, batched)."
                )
        return {**sample, self._field: self.row(sample["__url__"], sample["__key__"])}

    def row(self, url: str, key: str) -> int:
        """Return the id of a sample; UnknownSample if the index does not have it."""
        if url not in self._shards:
            self._shards[url] = self._find_shard(url)
        shard = self._shards[url]
        position = self._places_in(shard).get(key.encode(errors="surrogateescape"))
        if position is None:
            raise UnknownSample(
                f"{printable(public(url))}: sample {printable(key)!r} is not in the index. The shard has "
                f"changed, or `bigscl index` reported a problem with this sample. Run it again on these "
                f"shards, or leave unknown samples out with handler=wds.warn_and_continue."
            )
        return shard * self._index.rows_per_shard + position

    def _find_shard(self, url: str) -> int:
        """Return the shard of a url: the same url, or the one whose name it shares most of."""
        if public(url) in self._index.urls:
            return self._index.urls.index(public(url))
        endings = [(_common_end(url, name), shard) for shard, name in enumerate(self._index.shard_names)]
        best = max(length for length, _ in endings)
        shards = [shard for length, shard in endings if length == best]
        if best == 0 or len(shards) > 1:
            what = "no shard" if best == 0 else f"{len(shards)} shards"
            raise UnknownSample(
                f"{printable(public(url))}: {what} of this name in the index, which has "
                f"{printable(self._index.shard_names[0])} and others. Use the index of these shards."
            )
        return shards[0]

    def _places_in(self, shard: int) -> dict[bytes, int]:
        if shard not in self._places:
            rows, size = self._index.rows_per_shard, int(self._index.shard_sizes[shard])
            first = shard * rows
            keys = (bytes(self._index.keys[row]) for row in range(first, first + size))
            self._places[shard] = {key: position for position, key in enumerate(keys)}
            if len(self._places) > MOST_SHARDS:
                self._places.popitem(last=False)
        self._places.move_to_end(shard)
        return self._places[shard]


def _common_end(url: str, name: str) -> int:
    """Return how many folders, the tar's name included, end both; 0 if the tar has another name."""
    tar = list(TAR_NAME.finditer(url))
    parts = (url[: tar[-1].end()] if tar else url).split("/")
    others = name.split("/")
    # In a pipe, words of the command are before the path.
    parts[0] = parts[0].split(" ")[-1].removeprefix("file:")
    common = 0
    while common < min(len(parts), len(others)) and parts[-1 - common] == others[-1 - common]:
        common += 1
    return common


class RandomResizedCropWithView:
    """Torchvision's RandomResizedCrop and RandomHorizontalFlip, which returns (image, view).

    The image is a PIL image or a tensor [...,H,W]. The view is float32 [5], see
    `ViewRow`. Transforms that follow must move no pixel.
    """

    def __init__(
        self,
        size: int,
        *,
        scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
        flip: float = 0.5,
        interpolation: str = "bilinear",
        antialias: bool = True,
    ) -> None:
        """`flip` is the share of views that are mirrored; `interpolation` as in torchvision's enum."""
        from torchvision.transforms import InterpolationMode

        if not 0 <= flip <= 1:
            raise UserError(f"flip: found {flip}, expected a share in 0 to 1")
        self.size, self.scale, self.ratio, self.flip = size, scale, ratio, flip
        self.interpolation, self.antialias = InterpolationMode(interpolation), antialias

    def __call__(self, image: Any) -> tuple[Any, "Tensor"]:
        """Return a random part of the image in the size, and the view of it."""
        import torch
        from torchvision.transforms import RandomResizedCrop
        from torchvision.transforms.v2 import functional as F

        image_height, image_width = F.get_size(image)
        top, left, height, width = RandomResizedCrop.get_params(image, list(self.scale), list(self.ratio))
        mirrored = torch.rand(()).item() < self.flip
        pixels = F.resized_crop(
            image, top, left, height, width, [self.size] * 2, self.interpolation, self.antialias
        )
        view = View(
            left=left,
            top=top,
            width=width,
            height=height,
            flip=mirrored,
            image_width=image_width,
            image_height=image_height,
        )
        return F.horizontal_flip(pixels) if mirrored else pixels, torch.tensor(view.fractions())
