"""Checkpoints with float8 weights and a scale per block, as transformers writes and reads them."""

from __future__ import annotations

import contextlib
import json
import weakref
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from slime_like.config.schema.resolved import Layout
from tests.train.faults import replace_attribute
from tests.train.jobs import Shared, make_actor
from tests.train.models import rewrite
from tests.train.ranks import RankWorld

BLOCK = (4, 2)


def quantise(folder: Path, block: tuple[int, int] = BLOCK) -> Path:
    """Replace the projections and experts of the model in ``folder``, including its MTP tensors, by float8 weights."""
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    config_entry: dict[str, Any] = {
        "quant_method": "fp8",
        "weight_block_size": list(block),
        "activation_scheme": "dynamic",
    }
    settings = SimpleNamespace(quantization_config=SimpleNamespace(weight_block_size=block, scale_fmt=None))
    quantizer: Any = Fp8Quantize(settings)

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        out: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            is_quantised = name.endswith("_proj.weight") or name.startswith("mtp.fc")
            parts: dict[str, Tensor] = quantizer.convert({name: tensor}) if is_quantised else {name: tensor}
            assert len(parts) == 1 + is_quantised, f"{name} {list(tensor.shape)} does not divide into blocks"
            out |= parts
        return out

    rewrite(folder, change)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config_entry}))
    return folder


@contextlib.contextmanager
def dequantising() -> Generator[None]:
    """Let transformers load float8 checkpoints as float32 without accelerate, which it only needs to place weights."""
    from transformers.quantizers import quantizer_finegrained_fp8

    with replace_attribute(quantizer_finegrained_fp8, "is_accelerate_available", lambda: True):
        yield


def peak_bytes(world: RankWorld, shared: Shared, kind: str) -> int:
    """Load the model. Return the largest total size of dequantised tensors that were in memory at the same time."""
    from slime_like.train.megatron.families import hf

    live, peak = 0, 0
    stock = hf.dequantise

    def free(num_bytes: int) -> None:
        nonlocal live
        live -= num_bytes

    def counting_dequantise(*args: Any) -> Tensor:
        nonlocal live, peak
        out = stock(*args)
        live += out.nbytes
        peak = max(peak, live)
        weakref.finalize(out, free, out.nbytes)
        return out

    with replace_attribute(hf, "dequantise", counting_dequantise):
        make_actor(world, shared.models[kind], Layout())
    return peak
