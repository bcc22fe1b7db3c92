"""Map pooling: half the usual logit, half that of the hottest quarter of the cells.

It finds small objects, which the mean over all cells hides. It needs no other training: a network is trained
and exported with its usual pooling, and wrapped in `MapPooling` where the better ranking is worth the map.
"""

# Shapes: B batch, L classes, G side of the score map.

from torch import Tensor, nn

from bigscl.method.precision import at_least_float32
from bigscl.models.head import find_head
from bigscl.models.spatial import Prediction, SpatialClassifier, pool


class MapPooling(nn.Module):
    """A network that returns the logits [B,L] of map pooling: `bigscl.MapPooling(network)(images)`.

    The network is one of `bigscl.build_model`, or the plain one of its library with exported weights.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        if not isinstance(network, SpatialClassifier):
            network = SpatialClassifier(network, find_head(network, type(network).__name__))
        self.classifier = network

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of a batch."""
        return map_pooled(self.classifier(images, maps=True))


def map_pooled(prediction: Prediction) -> Tensor:
    """Return [B,L]: `0.5 * logit pooled over all cells + 0.5 * logit pooled over their hottest quarter`.

    A quarter of n cells is ceil(n / 4) of them: 13 of 7 x 7. Each class has its own.
    """
    assert prediction.logit_map is not None, "map pooling needs the map"
    cells = at_least_float32(prediction.logit_map).flatten(2)
    # In order, so that their sum has the same last bits wherever the image is in its batch.
    hottest = cells.topk(num_hottest(cells.shape[2]), dim=2).values
    return 0.5 * prediction.logits + 0.5 * pool(hottest[..., None])


def num_hottest(num_cells: int) -> int:
    """Return a quarter of the cells, rounded up."""
    return -(-num_cells // 4)
