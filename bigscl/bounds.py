"""Numbers with bounds, for the fields of settings: the config checks them when it is read."""

from typing import Annotated

from pydantic import Field

# What numpy, torch and file formats take; a larger number is a mistake.
LARGEST = 2**63 - 1
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1, le=LARGEST)]
CountOrZero = Annotated[int, Field(ge=0, le=LARGEST)]
