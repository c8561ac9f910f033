"""Quantised checkpoints are refused for every role: cast without their scales they would load as garbage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slime_like.cli import main
from slime_like.errors import CheckpointError
from slime_like.train.megatron.families.hf import HFFolder
from tests.config.bad_input import message
from tests.config.model_folder import write_model

NAME = "model.layers.0.self_attn.q_proj"
TENSORS = {
    "float8 with its scales": ({f"{NAME}.weight": "F8_E4M3", f"{NAME}.weight_scale_inv": "F32"}, "F8_E4M3"),
    "scales alone": ({f"{NAME}.weight": "BF16", f"{NAME}.weight_scale_inv": "F32"}, "float8 with a scale per block"),
    "int8": ({f"{NAME}.weight": "I8"}, "in I8"),
    "compressed-tensors": ({f"{NAME}.weight_packed": "I32", f"{NAME}.weight_scale": "BF16"}, "compressed-tensors"),
    "GPTQ": ({f"{NAME}.qweight": "I32", f"{NAME}.g_idx": "I32"}, "GPTQ or AWQ"),
    "AWQ": ({f"{NAME}.qzeros": "I32"}, "GPTQ or AWQ"),
    "MXFP4": ({"model.layers.0.mlp.experts.gate_up_proj_blocks": "U8"}, "MXFP4"),
    "bitsandbytes": ({f"{NAME}.weight.absmax": "F32"}, "bitsandbytes"),
}
CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "float8": ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, "quant_method='fp8'"),
    "of the text part": (
        {"text_config": {"quantization_config": {"quant_method": "mxfp4"}}},
        "text_config.quantization_config.quant_method='mxfp4'",
    ),
    "compressed-tensors": ({"compression_config": {"format": "pack-quantized"}}, "compression_config.format"),
}
ROLES = {
    "model.hf_checkpoint": "",
    "model.ref_checkpoint": "",
    "teacher.hf_checkpoint": "algo=distill",
    "critic.hf_checkpoint": "algo=ppo",
}


def with_tensors(folder: Path, dtypes: dict[str, str]) -> Path:
    """Write a model folder whose safetensors file has tensors of 8 elements with these dtypes."""
    widths = {"F8_E4M3": 1, "I8": 1, "U8": 1, "BF16": 2, "F32": 4, "I32": 4}
    header: dict[str, Any] = {}
    end = 0
    for name, dtype in dtypes.items():
        header[name] = {"dtype": dtype, "shape": [8], "data_offsets": [end, end + 8 * widths[dtype]]}
        end += 8 * widths[dtype]
    text = json.dumps(header).encode()
    (write_model(folder) / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))
    return folder


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_of_a_quantised_model_are_named(name: str, tmp_path: Path, argv: list[str]) -> None:
    dtypes, words = TENSORS[name]
    folder = with_tensors(tmp_path / "quantised", dtypes)
    text = message(argv, f"model.hf_checkpoint={folder}", files=True, error=CheckpointError)
    assert f"model.hf_checkpoint='{folder}' is a quantised checkpoint (model.safetensors holds '{NAME[:14]}" in text
    assert words in text and "bfloat16" in text
    with pytest.raises(CheckpointError, match="is a quantised checkpoint"):
        HFFolder(folder).tensor(next(iter(dtypes)), (8,))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_of_a_quantised_model_is_named(name: str, tmp_path: Path, argv: list[str]) -> None:
    changes, words = CONFIGS[name]
    folder = write_model(tmp_path / "quantised", **changes)
    text = message(argv, f"model.hf_checkpoint={folder}", files=True, error=CheckpointError)
    assert "is a quantised checkpoint (config.json has" in text and words in text
    with pytest.raises(CheckpointError, match="is a quantised checkpoint"):
        HFFolder(folder)


@pytest.mark.parametrize("key", ROLES)
def test_every_role_refuses_a_quantised_checkpoint(
    key: str, tmp_path: Path, argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    by_tensor = with_tensors(tmp_path / "tensors", TENSORS["float8 with its scales"][0])
    by_config = write_model(tmp_path / "config", quantization_config={"quant_method": "gptq", "bits": 4})
    by_file = write_model(tmp_path / "modelopt")
    (by_file / "hf_quant_config.json").write_text("{}")
    for folder in (by_tensor, by_config, by_file):
        assert main([*argv, *ROLES[key].split(), f"{key}={folder}", "--plan"]) == 2
        assert f"CheckpointError: {key}='{folder}' is a quantised checkpoint" in capsys.readouterr().err


def test_a_null_quantization_config_passes(tmp_path: Path, argv: list[str]) -> None:
    folder = write_model(tmp_path / "plain")
    (folder / "config.json").write_text(
        json.dumps({**json.loads((folder / "config.json").read_text()), "quantization_config": None})
    )
    assert main([*argv, f"model.hf_checkpoint={folder}", "--plan"]) == 0
