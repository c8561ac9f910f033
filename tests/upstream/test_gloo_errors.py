"""The text by which ``convert_damage`` recognizes that gloo lost a peer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from slime_like.util.deadline import scale

RANK = """
import os, sys
from datetime import timedelta
import torch
import torch.distributed as dist
rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=30))
dist.barrier()
if rank == 1:
    os._exit(0)
try:
    while True:
        dist.all_reduce(torch.zeros(4))
except RuntimeError as error:
    from slime_like.train.megatron.model_io.damage import GLOO

    print(GLOO in str(error), error, flush=True)
    os._exit(0)
"""


@pytest.mark.upstream
@pytest.mark.slow
def test_an_error_of_gloo_names_its_transport(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RANK]
    peer = subprocess.Popen([*command, "1", tmp_path / "store"])
    try:
        result = subprocess.run(
            [*command, "0", tmp_path / "store"], capture_output=True, text=True, check=False, timeout=120 * scale()
        )
    finally:
        peer.kill()
        peer.wait()
    assert result.stdout.startswith("True "), result.stdout + result.stderr
