"""A run's weights as HF folders: while it goes on, at its end, and from its checkpoints by scripts/export_hf.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from slime_like.util.deadline import Deadline
from tests.e2e.conftest import SFT_STEPS, Warm
from tests.e2e.runs import REPOSITORY

pytestmark = pytest.mark.e2e


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


# A thread of gloo that is still at work, and wants the GIL, as the interpreter goes.
LATE = """
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


def test_exports_along_the_way_are_whole_models(warm: Warm) -> None:
    names = sorted(path.name for path in (warm.folder / "sft").glob("hf_iter_*"))
    assert names == [f"hf_iter_{n:07d}" for n in (SFT_STEPS // 2, SFT_STEPS)]
    halfway, end = (warm.folder / "sft" / name for name in names)
    assert AutoModelForCausalLM.from_pretrained(halfway).num_parameters() > 0
    last = weights(warm.folder / "sft" / "hf")
    assert all(torch.equal(tensor, last[name]) for name, tensor in weights(end).items())
    assert any(not torch.equal(tensor, last[name]) for name, tensor in weights(halfway).items())


def test_a_checkpoint_becomes_the_model_its_run_exported(warm: Warm, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(LATE)
    source = str(warm.folder / "sft")
    done = export(source, "--output", str(tmp_path / "hf"), "--dtype", "float32", PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    found, expected = weights(tmp_path / "hf"), weights(warm.folder / "sft" / "hf")
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    assert (tmp_path / "hf" / "tokenizer.json").is_file()


def test_no_checkpoint_is_one_message(tmp_path: Path) -> None:
    done = export(str(tmp_path), "--output", str(tmp_path / "hf"))
    assert done.returncode == 1
    assert done.stderr.startswith(f"CheckpointError: {tmp_path}: no checkpoint there")
    assert not (tmp_path / "hf").exists()
