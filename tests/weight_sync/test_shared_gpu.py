"""Weights from a GPU to page-locked shared memory: values, and the rate of a bucket.

Needs torch and pytest only:

    python -m pytest -q --noconftest -m gpu tests/weight_sync/test_shared_gpu.py
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]  # not installed on every machine with a GPU

import pytest  # noqa: E402
import torch  # noqa: E402

from slime_like.interfaces import Bucket  # noqa: E402
from slime_like.weight_sync.shared import SharedBucketMemory, map_tensors  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
ROWS = 4096


def test_a_bucket_is_copied_to_page_locked_memory(record_property: Callable[[str, object], None]) -> None:
    numbers = torch.randn(ROWS, 1024).bfloat16()  # on the host, so that a phantom GPU has them too
    tensors = {f"w{i}": numbers.roll(i).cuda() for i in range(32)}
    memory = SharedBucketMemory()
    bucket = Bucket(tuple(tensors.items()))
    message = memory.write(bucket)  # allocates and locks the memory
    assert all(tensor.is_pinned() for _, tensor in memory.bucket.tensors)
    start = time.perf_counter()
    message = memory.write(bucket)
    seconds = time.perf_counter() - start
    record_property("copy_gb_per_s", round(sum(t.nbytes for t in tensors.values()) / seconds / 1e9, 2))
    with map_tensors(message) as received_tensors:
        assert all(torch.equal(tensor, tensors[name].cpu()) for name, tensor in received_tensors)
    memory.close()
