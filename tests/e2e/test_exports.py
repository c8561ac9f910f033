"""A run's weights as HF folders: exported during the run, at its end, and from a checkpoint by scripts/export_hf.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slime_like.util.deadline import Deadline
from tests.e2e.conftest import SFT_STEPS, WarmStart
from tests.e2e.runs import REPOSITORY

pytestmark = pytest.mark.e2e


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


# Start a collective when the interpreter exits, so that a gloo thread is still active and needs the GIL.
LATE_COLLECTIVE = """
import atexit, sys, time

@atexit.register
def collective():
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        dist.all_reduce(torch.ones(10_000_000), async_op=True)
        sys.setswitchinterval(1000)
        end = time.monotonic() + 1
        while time.monotonic() < end:
            pass
"""


def export(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(REPOSITORY / "scripts" / "export_hf.py"), *arguments]
    limit = Deadline("test", "export_hf.py", 120).limit
    variables = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False, env=variables)


def test_exports_during_the_run_are_complete_models(warm_start: WarmStart) -> None:
    from transformers import AutoModelForCausalLM  # takes seconds

    names = sorted(path.name for path in (warm_start.folder / "sft").glob("hf_iter_*"))
    assert names == [f"hf_iter_{n:07d}" for n in (SFT_STEPS // 2, SFT_STEPS)]
    halfway, last = (warm_start.folder / "sft" / name for name in names)
    assert AutoModelForCausalLM.from_pretrained(halfway).num_parameters() > 0
    final = weights(warm_start.folder / "sft" / "hf")
    assert weights(last).keys() == weights(halfway).keys() == final.keys()
    assert all(torch.equal(tensor, final[name]) for name, tensor in weights(last).items())
    assert any(not torch.equal(tensor, final[name]) for name, tensor in weights(halfway).items())


def test_a_checkpoint_becomes_the_model_its_run_exported(warm_start: WarmStart, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(LATE_COLLECTIVE)
    source = str(warm_start.folder / "sft")
    result = export(source, "--output", str(tmp_path / "hf"), "--dtype", "float32", PYTHONPATH=str(tmp_path))
    assert (result.returncode, result.stderr) == (0, "")
    tensors, expected = weights(tmp_path / "hf"), weights(warm_start.folder / "sft" / "hf")
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())
    assert (tmp_path / "hf" / "tokenizer.json").is_file()


def test_no_checkpoint_is_one_message(tmp_path: Path) -> None:
    result = export(str(tmp_path), "--output", str(tmp_path / "hf"))
    assert result.returncode == 1
    assert result.stderr.startswith(f"CheckpointError: {tmp_path}: no checkpoint found")
    assert not (tmp_path / "hf").exists()
