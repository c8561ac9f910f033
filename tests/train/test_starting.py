"""Initial weights from Megatron folders of other trainers, and conversion of checkpoints to HF folders."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slime_like.config.schema.resolved import Layout
from tests.train.hostile import PLANTS
from tests.train.jobs import SP, RankJob, Results

pytestmark = pytest.mark.ranks

TARGETS = {"tp2": Layout(**SP), "pp2": Layout(pp=2), "vpp2": Layout(pp=2, vpp=2)}
EXPERTS = (Layout(dp=2, ep=2), "qwen3_moe")
JOBS = {
    1: [
        RankJob("gpt", "tests.train.starting:write_gpt", (False,)),
        RankJob("gpt fused", "tests.train.starting:write_gpt", (True,)),
        RankJob("gpt experts", "tests.train.starting:write_gpt", (False, "qwen3_moe")),
        RankJob("start from gpt", "tests.train.starting:start_from", ("gpt", Layout())),
        RankJob("start from gpt fused", "tests.train.starting:start_from", ("gpt_fused", Layout())),
        RankJob("a run", "tests.train.lifecycle:save_then_continue", (Layout(),)),
        RankJob("own weights", "tests.train.starting:own_weights", ("a_run",)),
        RankJob("bad starts", "tests.train.starting:bad_starts", ("gpt",)),
        RankJob("planted code", "tests.train.hostile:read_planted", ("gpt", "a_run")),
        RankJob("export checkpoint", "tests.train.starting:export_checkpoint", ("a_run",)),
    ],
    2: [
        RankJob(f"start from gpt, {name}", "tests.train.starting:start_from", ("gpt", layout))
        for name, layout in TARGETS.items()
    ]
    + [RankJob("start from gpt experts, ep2", "tests.train.starting:start_from", ("gpt_experts", *EXPERTS))],
}


def test_gpt_model_stacks_its_layers(results: Results) -> None:
    """GPTModel stores each parameter of all blocks under one key, which the reader of initial weights supports."""
    (source,) = results["gpt"]
    assert "decoder.layers.self_attention.linear_qkv.weight" in source["keys"]
    assert "decoder.final_layernorm.weight" in source["keys"]


@pytest.mark.parametrize("name", ["gpt", "gpt fused", *(f"gpt, {name}" for name in TARGETS), "gpt experts, ep2"])
def test_a_gpt_checkpoint_gives_the_same_scores(name: str, results: Results) -> None:
    (source,) = results[name.split(",")[0]]
    (last_stage,) = [r for r in results[f"start from {name}"] if r["scores"] is not None]
    if "tp2" in name:  # projections are sums of two halves, with other rounding
        np.testing.assert_allclose(last_stage["logits"], source["logits"], atol=3e-6, rtol=0)
    elif "experts" not in name:
        assert np.array_equal(last_stage["logits"], source["logits"])
    np.testing.assert_allclose(last_stage["scores"][1:], source["logprobs"], atol=1e-5, rtol=0)
    assert np.ptp(source["logprobs"]) > 0.1
    assert last_stage["kl"] == 0  # the reference has the initial weights


def test_weights_of_another_run_without_its_optimizer(results: Results) -> None:
    (result,) = results["own weights"]
    assert result == {"same": True, "steps": 0, "version": 0}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("other family", "k_layernorm.weight', which the model of model.hf_checkpoint does not have"),
        ("cut", "is damaged, or not a torch_dist checkpoint"),
        ("garbled", "is damaged, or not a torch_dist checkpoint"),
    ],
)
def test_an_unusable_folder_is_refused_with_its_key(name: str, message: str, results: Results) -> None:
    (errors,) = results["bad starts"]
    assert errors[name].startswith("CheckpointError: model.megatron_checkpoint: ")
    assert message in errors[name]


@pytest.mark.parametrize("path", ["start", "reference", "export", "resume", "critic"])
@pytest.mark.parametrize("plant", PLANTS)
def test_code_in_a_checkpoint_does_not_run(path: str, plant: str, results: Results) -> None:
    (outcomes,) = results["planted code"]
    text: str = outcomes[f"{path}, {plant}"]
    assert text.startswith("CheckpointError: "), text
    assert "\n" not in text
    file = {"in an object": "__9_9.distcp", "in common.pt": "common.pt"}.get(plant, ".metadata")
    assert f"/{file}: " in text
    assert ("../elsewhere.distcp" if plant == "outside" else "posix.system") in text


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.1)])
def test_an_exported_checkpoint_loads_in_transformers(dtype: str, tolerance: float, results: Results) -> None:
    from transformers import AutoModelForCausalLM

    (exported,) = results["export checkpoint"]
    folder, rows = exported["folders"][dtype], exported["rows"]
    assert len(list(folder.glob("*.safetensors"))) > 2
    assert (folder / "model.safetensors.index.json").is_file()
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert str(model.dtype) == f"torch.{dtype}"
    ids = torch.from_numpy(rows.token_ids.astype(np.int64))[None]
    with torch.no_grad():
        logits = model.float()(input_ids=ids).logits[0, :-1]
    expected = torch.log_softmax(logits / 0.7, -1).gather(1, ids[0, 1:, None])[:, 0].numpy()
    np.testing.assert_allclose(exported["scores"][1:], expected, atol=tolerance, rtol=0)
