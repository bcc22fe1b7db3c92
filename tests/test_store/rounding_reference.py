"""What the codec `uint8` does to a row, one value after the other, in whole numbers."""

import math
from bisect import bisect_right
from fractions import Fraction

import numpy as np

LEVELS = sorted({float(np.float16(math.sin(math.pi * k / 514) ** 2)) for k in range(258)})


def slowly_rounded(values, sample, epoch):
    """The values of one sample's row after an update in this epoch."""
    shift = shift_of(sample, epoch)
    rounded = [one(float(value), (place * 40503 + shift) % 2**16) for place, value in enumerate(values.flat)]
    return np.array(rounded, np.float16).reshape(values.shape)


def one(value, chance):
    """The level below, or that above if the chance (of 2**16) says so."""
    below = bisect_right(LEVELS, value) - 1
    if LEVELS[below] == value:
        return value
    low, high = Fraction(LEVELS[below]), Fraction(LEVELS[below + 1])
    share = math.floor(256 * (Fraction(value) - low) / (high - low) + Fraction(1, 2))
    return float(high if chance // 256 + share >= 256 else low)


def shift_of(sample, epoch):
    """The upper bits of splitmix64's finalizer."""
    mixed = (sample * 0x9E3779B97F4A7C15 + epoch * 0xD1B54A32D192ED03) % 2**64
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
    return (mixed ^ mixed >> 31) >> 48
