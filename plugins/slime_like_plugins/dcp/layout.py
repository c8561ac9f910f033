"""Token positions of one rank of a DCP group, and ``LengthBucket`` objects for its part of the KV cache.

The axes are those of ``sglang_cpu.attention``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slime_like_plugins.sglang_cpu.attention import MASK_ELEMENTS, LengthBucket, length_class, padded_slots


def local_lens(lens_B: Tensor, size: int, rank: int) -> Tensor:
    """Return how many positions below ``lens_B`` belong to ``rank``, i.e. have position % size == rank."""
    return torch.div(lens_B + (size - 1 - rank), size, rounding_mode="floor")


def token_table(new: Sequence[int]) -> Tensor:
    """Return a page table [B, max(new)] whose slots are rows of a packed batch that has ``new[i]`` tokens of request i.

    Only the first ``new[i]`` slots of row i are valid.
    """
    starts = torch.tensor([0, *new[:-1]]).cumsum(0)
    return starts[:, None] + torch.arange(max(new))[None]


def prefix_buckets(table: Tensor, new: Sequence[int], kv_lens: Sequence[int]) -> list[LengthBucket]:
    """Return buckets in which all ``new[i]`` packed queries of request i attend to the first ``kv_lens[i]`` slots of its row.

    ``table`` has one row of slots per request. Requests without slots, or without new tokens, are in no bucket.
    """
    starts = [0, *torch.tensor(list(new)).cumsum(0).tolist()]
    groups: dict[tuple[int, int], list[int]] = {}
    for row, (count, length) in enumerate(zip(new, kv_lens, strict=True)):
        if count and length:
            groups.setdefault((length_class(count), length_class(length)), []).append(row)
    buckets: list[LengthBucket] = []
    for members in groups.values():
        area = max(new[row] for row in members) * max(kv_lens[row] for row in members)
        num_requests = max(1, MASK_ELEMENTS // area)
        for first in range(0, len(members), num_requests):
            part = members[first : first + num_requests]
            q = torch.arange(max(new[row] for row in part))[None]
            valid_bQ = q < torch.tensor([new[row] for row in part])[:, None]
            tokens_bQ = torch.tensor([starts[row] for row in part])[:, None] + torch.where(valid_bQ, q, 0)
            slots_bL, exists_bL = padded_slots(table[torch.tensor(part)], [kv_lens[row] for row in part])
            buckets.append(LengthBucket(tokens_bQ, valid_bQ, slots_bL, exists_bL[:, None]))
    return buckets
