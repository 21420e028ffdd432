"""Which record is the n-th sample of a run: a pure function of the seed and n, without state and without tables.

A resumed run, or one with other data parallelism, micro-batch size or length, asks for the same n and gets the same
record. Buckets hold records of one shape; consecutive samples form groups of ``group_size`` (the global batch), and a
group takes all its records from one bucket, so that every rank sees one shape in a step.

The bucket of group g is read off a rotation: the point (g * step + start) modulo the number of records falls into
bucket b's interval, which is as long as the bucket is large. Over any ``total`` consecutive groups each bucket gets
exactly its share, and how often it came up before g is a floor sum, known in O(log) steps. That count gives the place
within the bucket, and a keyed permutation of each bucket epoch gives the record.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

MAX_SAMPLES = 1 << 48
_ROUNDS = 8
_MIN_HALF_BITS = 3
_GOLDEN = (math.sqrt(5) - 1) / 2


class SampleOrder:
    """Order of an endless stream of samples over buckets of records.

    Each bucket is gone through epoch by epoch: every record once, in a new order, before any comes again. Over any
    ``sum(bucket_sizes)`` consecutive groups every record of every bucket comes exactly ``group_size`` times.

    Args:
        bucket_sizes: records in each bucket, at least 1 each.
        seed: seed of the run; other seeds give unrelated orders.
        group_size: consecutive samples that share a bucket, the global batch size. With one bucket the order does not
            depend on it.

    Raises:
        ValueError: no bucket, an empty bucket, or ``group_size`` below 1.
    """

    def __init__(self, bucket_sizes: Sequence[int], seed: int, group_size: int) -> None:
        if not bucket_sizes or min(bucket_sizes) < 1:
            raise ValueError(f"bucket_sizes must be at least one number, each at least 1, got {list(bucket_sizes)}")
        if group_size < 1:
            raise ValueError(f"group_size must be at least 1, got {group_size}")
        self._sizes = tuple(int(size) for size in bucket_sizes)
        self._ends = list(accumulate(self._sizes))
        self._total = self._ends[-1]
        self._seed = int(seed)
        self._group_size = int(group_size)
        self._step = _coprime_step(self._total)
        self._start = _hash64("bucket start", self._seed) % self._total

    def bucket(self, index: int) -> int:
        """Bucket of global sample ``index``, the same for its whole group.

        Raises:
            IndexError: ``index`` is negative or at least 2**48.
        """
        _check_index(index)
        return bisect_right(self._ends, self._point(index // self._group_size))

    def record(self, index: int) -> int:
        """Record of global sample ``index``, numbered within its bucket.

        Raises:
            IndexError: ``index`` is negative or at least 2**48.
        """
        bucket = self.bucket(index)
        group, offset = divmod(index, self._group_size)
        position = self._groups_before(group, bucket) * self._group_size + offset
        epoch, place = divmod(position, self._sizes[bucket])
        return permuted(place, self._sizes[bucket], _hash64("epoch", self._seed, bucket, epoch))

    def _point(self, group: int) -> int:
        return (group * self._step + self._start) % self._total

    def _groups_before(self, group: int, bucket: int) -> int:
        """How many of the groups 0 .. group-1 belong to ``bucket``."""
        return self._below(group, self._ends[bucket]) - self._below(group, self._ends[bucket] - self._sizes[bucket])

    def _below(self, count: int, bound: int) -> int:
        """How many of the first ``count`` points are below ``bound``: there floor(x/m) - floor((x-bound)/m) is 1."""
        total, step, start = self._total, self._step, self._start
        return (_floor_sum(count, total, step, start + total)
                - _floor_sum(count, total, step, start + total - bound))


def permuted(place: int, size: int, key: int) -> int:
    """Image of ``place`` under a pseudo-random permutation of range(size) that ``key`` names.

    A Feistel network permutes the smallest power of four that holds ``size``, and at least 64: on halves of fewer than
    three bits its permutations are not evenly likely. Results outside are fed in again until one falls inside, which
    takes fewer than four turns on average from 17 records up.

    Raises:
        IndexError: ``place`` is not in range(size).
    """
    if not 0 <= place < size:
        raise IndexError(f"place must be in range({size}), got {place}")
    half_bits = max(_MIN_HALF_BITS, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    while True:
        left, right = place >> half_bits, place & mask
        for rounds in range(_ROUNDS):
            left, right = right, left ^ (_mix64(_mix64(key + rounds) + right) & mask)
        place = left << half_bits | right
        if place < size:
            return place


def _mix64(value: int) -> int:
    """Finaliser of SplitMix64: a bijection of 64-bit integers in which every input bit reaches every output bit."""
    value = (value + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    value = (value ^ value >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return value ^ value >> 31


def _hash64(*parts: object) -> int:
    """64 bits that depend on the parts alone, on every machine."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _coprime_step(total: int) -> int:
    """The step nearest to the golden section of ``total`` without a common divisor: visits every point, evenly."""
    middle = round(total * _GOLDEN)
    for distance in range(total + 1):
        for step in (middle - distance, middle + distance):
            if 0 < step <= total and math.gcd(step, total) == 1:
                return step
    raise AssertionError("1 has no common divisor with any number")


def _floor_sum(count: int, modulus: int, step: int, start: int) -> int:
    """Sum of floor((step * i + start) / modulus) over i in range(count), for step and start of 0 or more.

    Whole multiples of the modulus are summed in closed form; what is left counts lattice points under a line, which
    are counted along the other axis with step and modulus exchanged, as in Euclid's algorithm.
    """
    total = 0
    while count > 0:
        total += (step // modulus) * (count * (count - 1) // 2) + (start // modulus) * count
        step, start = step % modulus, start % modulus
        highest = step * count + start
        if highest < modulus:
            break
        count, start = divmod(highest, modulus)
        modulus, step = step, modulus
    return total


def _check_index(index: int) -> None:
    if not 0 <= index < MAX_SAMPLES:
        raise IndexError(f"a global sample index must be in 0..2**48-1, got {index}")
