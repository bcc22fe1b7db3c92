"""Types of numbers with bounds, for the fields of settings. The config checks them when it is read."""

from typing import Annotated

from pydantic import AfterValidator, Field

from bigscl.common.user_error import UserError

# The largest integer that numpy, torch and file formats take; a larger number is a mistake.
LARGEST = 2**63 - 1
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1, le=LARGEST)]
CountOrZero = Annotated[int, Field(ge=0, le=LARGEST)]


def _ordered(bounds: tuple[float, float]) -> tuple[float, float]:
    if bounds[0] > bounds[1]:
        raise UserError("expected the smallest value first, then the largest")
    return bounds


def _at_most_one(bounds: tuple[float, float]) -> tuple[float, float]:
    if bounds[1] > 1:
        raise UserError("expected shares of the image's area, so at most 1")
    return bounds


Range = Annotated[tuple[Positive, Positive], AfterValidator(_ordered)]
AreaRange = Annotated[Range, AfterValidator(_at_most_one)]
