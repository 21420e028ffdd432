"""Which records are held out for validation: a pure function of the records themselves.

Records are ranked by a hash of their checksum, so a data set that grows keeps most of its validation records, and
its order on disk does not matter. Clips of one video may fall on both sides.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

Shape = tuple[int, int, int, int]
Buckets = Mapping[Shape, Sequence[int]]


def held_out_records(checksums: Sequence[str], valid_samples: int) -> frozenset[int]:
    """Numbers of the ``valid_samples`` records that are held out.

    Args:
        checksums: content checksum of every record, in record order.
        valid_samples: how many to hold out; 0 holds out none.

    Raises:
        ValueError: ``valid_samples`` is negative, or leaves no record for training.
    """
    if not 0 <= valid_samples < max(1, len(checksums)):
        raise ValueError(f"--latent-valid-samples must be in 0..{max(0, len(checksums) - 1)} for a data set of "
                         f"{len(checksums)} samples, got {valid_samples}")
    ranks = [hashlib.blake2b(f"holdout/{checksum}".encode()).digest() for checksum in checksums]
    return frozenset(sorted(range(len(ranks)), key=lambda record: (ranks[record], record))[:valid_samples])


def split_buckets(buckets: Buckets, checksums: Sequence[str],
                  valid_samples: int) -> tuple[dict[Shape, list[int]], dict[Shape, list[int]]]:
    """Buckets for training and for validation; a bucket without a record on one side is missing there.

    Args:
        buckets: record numbers by latent shape.
        checksums: content checksum of every record, in record order.
        valid_samples: how many records to hold out, over all buckets.

    Raises:
        ValueError: see ``held_out_records``.
    """
    held_out = held_out_records(checksums, valid_samples)
    train = {shape: [record for record in records if record not in held_out] for shape, records in buckets.items()}
    valid = {shape: [record for record in records if record in held_out] for shape, records in buckets.items()}
    return ({shape: records for shape, records in train.items() if records},
            {shape: records for shape, records in valid.items() if records})
