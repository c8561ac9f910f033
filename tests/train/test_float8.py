"""Float8 checkpoints with a scale per block load as in transformers; exports of them are not quantised."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from slime_like.config.schema.resolved import Layout
from slime_like.train.megatron.families.float8 import dequantise
from slime_like.train.megatron.families.hf import HFFolder
from tests.train.float8 import dequantising
from tests.train.jobs import RankJob, Results
from tests.train.parity import by_expert, comparison
from tests.train.weights import tensors_of

pytestmark = pytest.mark.ranks

BOUND = 1e-5
DECAY_BOUND = 3e-4  # the error of transformers in float32 against float64 is as large
KIND = "float8"
FAULT = "unscaled_float8"
JOBS = {
    1: [
        RankJob("float8 single", "tests.train.parity:compare", (KIND, Layout(), {}, None)),
        RankJob(FAULT, "tests.train.parity:compare", (KIND, Layout(), {}, FAULT)),
        RankJob("float8 peak", "tests.train.float8:peak_bytes", (KIND,)),
    ],
    2: [
        RankJob("float8 round trip", "tests.train.lifecycle:round_trip", (KIND, Layout(dp=2, ep=2))),
        RankJob("float8 export", "tests.train.lifecycle:export", (KIND, Layout(pp=2), 40_000, "bfloat16")),
    ],
}


def test_equals_hf(results: Results) -> None:
    errors = comparison(results, "float8 single")
    assert errors.worst <= BOUND and errors.score <= BOUND, errors
    assert errors.decay <= DECAY_BOUND, errors


def test_weights_without_their_scales_exceed_the_bound(results: Results) -> None:
    errors = comparison(results, FAULT)
    assert errors.score > 100 * BOUND, errors


def test_an_export_has_the_weights_that_transformers_loads(models: dict[str, Path], results: Results) -> None:
    from transformers import AutoModelForCausalLM

    with dequantising():
        hf_model: Any = AutoModelForCausalLM.from_pretrained(models[KIND], dtype=torch.float32)
    folder: Path = results["float8 round trip"][0]
    exported = tensors_of(folder)
    expected: dict[str, Tensor] = by_expert(hf_model.state_dict())
    assert expected.keys() == {name for name in exported if not name.startswith("mtp.")}
    assert all(torch.equal(exported[name], tensor) for name, tensor in expected.items())
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    carried_names = [name for name in HFFolder(models[KIND]).names() if name.startswith("mtp.")]
    stored_tensors = tensors_of(models[KIND])
    assert {stored_tensors[name].dtype for name in carried_names} == {torch.float8_e4m3fn, torch.bfloat16}
    assert {name for name in exported if name.startswith("mtp.")} == set(carried_names)
    assert all(torch.equal(exported[n], HFFolder(models[KIND]).read_as_stored(n, torch.float32)) for n in carried_names)


def test_transformers_loads_an_export_without_quantisation(results: Results) -> None:
    exported = tensors_of(results["float8 export"][0].folder)
    assert not any(tensor.dtype == torch.float8_e4m3fn or "_scale" in name for name, tensor in exported.items())
    assert {exported[name].dtype for name in exported if name.startswith("mtp.")} == {torch.bfloat16}


def test_at_most_one_weight_is_held_in_float32(results: Results, models: dict[str, Path]) -> None:
    (peak,) = results["float8 peak"]
    sizes = {name: tensor.numel() for name, tensor in tensors_of(models[KIND]).items() if name.endswith("_proj.weight")}
    layer = sum(size for name, size in sizes.items() if ".layers.0." in name)
    assert 0 < peak <= 4 * 3 * max(sizes.values()) < 4 * layer  # query, key and value become one parameter


SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, int] | None]] = {
    "blocks": ((64, 48), (2, 3), (32, 16)),
    "blocks of fused experts": ((3, 64, 48), (3, 2, 3), (32, 16)),
    "a matrix": ((64, 48), (1, 1), None),
}


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
@pytest.mark.parametrize("name", SHAPES)
def test_products_equal_transformers(name: str, scale_dtype: torch.dtype) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    shape, grid, block = SHAPES[name]
    weight, scales = random_float8(shape), (torch.rand(grid) + 0.1).to(scale_dtype)
    for dtype in (torch.float32, torch.bfloat16):
        expected = Fp8Dequantize(None)._dequantize_one(weight, scales, dtype)
        assert torch.equal(dequantise(weight, scales, block).to(dtype), expected)


def test_incomplete_blocks_have_their_own_scales() -> None:
    weight, scales = random_float8((70, 37)), torch.rand(3, 3) + 0.1  # blocks of 32 x 16
    rows, columns = torch.arange(70)[:, None] // 32, torch.arange(37)[None] // 16
    expected = weight.double() * scales.double()[rows, columns]
    torch.testing.assert_close(dequantise(weight, scales, (32, 16)).double(), expected, rtol=1e-7, atol=0)


def test_a_part_of_fused_experts_equals_that_part_of_all(models: dict[str, Path], tmp_path: Path) -> None:
    name, shape = "model.layers.0.mlp.experts.gate_up_proj", (3, 64, 48)
    tensors = {name: random_float8(shape), f"{name}_scale_inv": torch.rand(3, 16, 24) + 0.1}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((models[KIND] / "config.json").read_text())
    folder = HFFolder(tmp_path)
    for expert in range(3):
        assert torch.equal(folder.part(name, shape, expert), folder.tensor(name, shape)[expert])
    assert folder.names() == [name]


def random_float8(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
