"""One rank of the doctor's collective check: ``python -m slime_like.cluster.start.gloo_check <store file> <rank> <world>``."""

from __future__ import annotations

import datetime
import sys

RANK_SECONDS = 45


def main(store: str, rank: int, world: int) -> int:
    """All-reduce ``rank + 1`` over gloo; return exit code 0 if the sum is right, else 1.

    A collective of ``world`` processes, which meet through the file ``store``.
    """
    import torch
    import torch.distributed as dist

    from slime_like.distributed.rendezvous import keep_to_interface
    from slime_like.util.deadline import scale

    keep_to_interface("127.0.0.1")  # as ranks of one machine do
    timeout = datetime.timedelta(seconds=RANK_SECONDS * scale())
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timeout)
    try:
        value = torch.tensor([rank + 1.0])
        dist.all_reduce(value)
        return int(value.item() != world * (world + 1) / 2)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
