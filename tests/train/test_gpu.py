"""The CUDA path: variable-length attention, NCCL, results equal to transformers'. Needs an NVIDIA GPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slime_like.config.rules.gdn import check_runtime
from slime_like.config.rules.gdn_runtime import runtime
from slime_like.config.rules.hf import GDNShape
from slime_like.config.schema.algo import SftConfig
from slime_like.config.schema.gdn import GDNConfig
from slime_like.config.schema.resolved import Layout
from slime_like.errors import ConfigError
from slime_like.metrics.types import reduce_metrics
from slime_like.train.megatron.platform import host
from tests.train import parity
from tests.train.jobs import Results, annotated, run_on_gpu, save_checkpoint, start_trainer
from tests.train.lifecycle import batch, train
from tests.train.models import count_tokens, make_model, make_spec
from tests.train.ranks import RankWorld, run_ranks
from tests.values import has_values

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.ranks,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
WIDE: dict[str, Any] = {  # FlashQLA supports only heads of 128
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
HYBRID_BACKENDS = ("torch", "fla") if importlib.util.find_spec("fla") else ("torch",)


@pytest.fixture(scope="module")
def folders(qwen3: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return folders of small models."""
    folder = tmp_path_factory.mktemp("models")
    families = {"qwen3_moe": ("qwen3_moe", False, 7), "qwen3_5": ("qwen3_5_text", True, 5)}
    return qwen3 | {
        name: make_model(folder / name, family, tied=tied, seed=seed) for name, (family, tied, seed) in families.items()
    }


@pytest.fixture(scope="module")
def results(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Return the results of this module's functions for one GPU, run in one process, except FlashQLA's and TE's."""
    scratch, module = tmp_path_factory.mktemp("gpu"), "tests.train.test_gpu"
    calls = {
        "options": (f"{module}:options_on_gpu", folders["tied"], scratch / "options"),
        "tied": (f"{module}:on_gpu", folders["tied"], scratch / "tied"),
        "qwen3_moe": (f"{module}:on_gpu", folders["qwen3_moe"], scratch / "qwen3_moe"),
        "hybrid": (f"{module}:hybrid_on_gpu", folders["qwen3_5"], HYBRID_BACKENDS),
        "same bits": (f"{module}:same_bits", folders["tied"]),  # the last, because torch stays deterministic
    }
    return run_on_gpu(calls, CUBLAS_WORKSPACE_CONFIG=":4096:8")


def actor_on_gpu(world: RankWorld, folder: Path, **spec: Any) -> Any:
    return actor_on("cuda", world, folder, **spec)


def actor_on(device: str, world: RankWorld, folder: Path, **spec: Any) -> Any:
    if has_values():
        return start_trainer(world, make_spec(folder, Layout(), device=device, **spec))
    from slime_like.train.megatron.trace import solo

    solo.keep_objects()  # before the collectives are wrapped
    actor = start_trainer(world, make_spec(folder, Layout(), device=device, **spec))
    solo.adapt()
    return actor


def loss_of(metrics: Mapping[str, float]) -> float:
    """Return the loss, or 0 on a phantom GPU, where a step has no metrics."""
    return metrics["train/loss"] if has_values() else 0.0


def on_gpu(world: RankWorld, folder: Path, scratch: Path) -> dict[str, Any]:
    """Return the errors of float32 gradients, bfloat16 scores, a resumed run and an export, and the losses of a run."""
    host.install("cuda")

    ref = parity.reference(folder)
    rows = parity.batch()
    out: dict[str, Any] = {}
    actor = actor_on_gpu(world, folder, algo=parity.ALGO, temperature=parity.TEMPERATURE)
    trainer = actor
    trainer.optimizer_step.backward(annotated(trainer, rows), count_tokens(rows), None)
    grads = {name: g.cuda() for name, g in ref.grads.items()}
    out["grad"] = max(parity.gradient_errors(trainer, grads).values())
    metrics = reduce_metrics(actor.train_rollout([rows], [count_tokens(rows)]))
    out["loss"] = abs(loss_of(metrics) / ref.loss - 1)

    half = {"dtype": "bfloat16", "algo": SftConfig(), "optim": {"lr": 5e-3}}
    actor = actor_on_gpu(world, folder, temperature=parity.TEMPERATURE, **half)
    scores = [actor.score(r) for r in rows]
    out["bfloat16 score"] = max(float(np.abs(s - e).max()) for s, e in zip(scores, ref.logprobs, strict=True))
    actor = actor_on_gpu(world, folder, model={"recompute": "full"}, **half)
    out["losses"] = [loss_of(train(actor, Layout(), 1)) for _ in range(4)]
    save_checkpoint(actor, scratch / "checkpoint", 4)
    train(actor, Layout(), 2)
    resumed = actor_on_gpu(world, folder, model={"recompute": "full"}, **half)
    resumed.load(scratch / "checkpoint")
    train(resumed, Layout(), 2)
    out["resumed"] = max(
        float((a.detach() - b.detach()).abs().max())
        for a, b in zip(actor.model.parameters(), resumed.model.parameters(), strict=True)
    )
    resumed.export_hf(scratch / "hf")
    out["export"] = export_error(resumed, scratch / "hf") if has_values() else 0.0
    return out


def export_error(actor: Any, folder: Path) -> float:
    """Return the largest difference between the actor's scores and those of transformers with the bfloat16 export."""
    from transformers import AutoModelForCausalLM

    hf_model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to("cuda")  # pyright: ignore[reportArgumentType]
    row = batch(1)[1]
    ids = torch.from_numpy(row.token_ids.astype(np.int64)).cuda()[None]
    with torch.no_grad():
        log_p = torch.log_softmax(hf_model(input_ids=ids).logits[0, :-1].float() / 0.7, -1)
    expected = log_p.gather(1, ids[0, 1:, None])[:, 0].cpu().numpy()
    return float(np.abs(actor.score(row)[1:] - expected).max())


def options_on_gpu(world: RankWorld, folder: Path, scratch: Path) -> dict[str, Any]:
    """Compare gradients with and without recompute, and runs with and without an offloaded optimizer."""
    from tests.train.options import gradients
    from tests.train.test_options import VARIANTS

    plain = gradients(actor_on_gpu(world, folder, algo=parity.ALGO))
    out: dict[str, Any] = {"recompute": {}}
    for name, model in VARIANTS.items():
        grads = gradients(actor_on_gpu(world, folder, algo=parity.ALGO, model=model))
        out["recompute"][name] = max(float((grads[k] - plain[k]).abs().max() / plain[k].abs().max()) for k in plain)
    half: dict[str, Any] = {"dtype": "bfloat16", "algo": SftConfig()}
    divided: dict[str, Any] = {"lr": 5e-3, "cpu_offload": True, "cpu_offload_fraction": 0.5}
    device, actor, resumed = (actor_on_gpu(world, folder, **half, optim=o) for o in ({"lr": 5e-3}, divided, divided))
    for name, rank_trainer in (("device", device), ("half", actor)):
        out[name] = [loss_of(train(rank_trainer, Layout(), 1)) for _ in range(4)]
    save_checkpoint(actor, scratch / "offloaded", 4)
    resumed.load(scratch / "offloaded")
    out["resumed"] = [loss_of(train(rank_trainer, Layout(), 1)) for rank_trainer in (actor, resumed) for _ in range(2)]
    return out


def test_options_on_one_gpu(results: Results) -> None:
    (result,) = results["options"]
    assert len(result["recompute"]) > 1 and [len(result[name]) for name in ("device", "half", "resumed")] == [4, 4, 4]
    if has_values():
        assert {name: error for name, error in result["recompute"].items() if error > 1e-5} == {}
        assert result["half"] == pytest.approx(result["device"], rel=1e-2), result
        assert result["resumed"][2:] == pytest.approx(result["resumed"][:2], rel=1e-2), result


@pytest.mark.parametrize("kind", ["tied", "qwen3_moe"])
def test_one_gpu(kind: str, results: Results) -> None:
    (result,) = results[kind]
    assert result.keys() == {"grad", "loss", "bfloat16 score", "losses", "resumed", "export"}
    if has_values():
        assert result["grad"] < 1e-4 and result["loss"] < 1e-5, result
        assert result["bfloat16 score"] < 0.3, result
        assert result["losses"][-1] < 0.8 * result["losses"][0], result
        assert result["resumed"] < 1e-2, result  # flash attention's backward adds in no fixed order
        assert result["export"] < 0.1, result


def hybrid_on_gpu(
    world: RankWorld, folder: Path, backends: tuple[str, ...], device: str = "cuda"
) -> dict[str, dict[str, float]]:
    """Return errors of scores and gradients (without decays) of a bfloat16 Gated DeltaNet model against HF in float32.

    The keys are the descriptions of the kernels that ran, one per backend.
    """
    host.install(device)

    ref, rows = parity.reference(folder), parity.batch()
    grads = {name: grad.to(device) for name, grad in ref.grads.items()}
    out: dict[str, dict[str, float]] = {}
    for name in backends:
        spec: dict[str, Any] = {"dtype": "bfloat16", "algo": parity.ALGO, "temperature": parity.TEMPERATURE}
        actor = actor_on(device, world, folder, model={"gdn": GDNConfig(backend=name)}, **spec)
        scores = [actor.score(r) for r in rows]
        actor.optimizer_step.backward(annotated(actor, rows), count_tokens(rows), None)
        errors = parity.gradient_errors(actor, grads)
        (kernels,) = actor.kernels()
        out[kernels] = {
            "score": max(float(np.abs(s - e).max()) for s, e in zip(scores, ref.logprobs, strict=True)),
            "grad": max(error for key, error in errors.items() if not key.endswith(parity.DECAYS)),
        }
    return out


def assert_backends_agree(errors_of: dict[str, dict[str, float]], backends: tuple[str, ...]) -> None:
    assert [kernels.partition(":")[0] for kernels in errors_of] == [
        f"Gated DeltaNet ran on {name}" for name in backends
    ]
    for errors in errors_of.values():
        assert not has_values() or (errors["score"] < 0.3 and errors["grad"] < 0.1), errors_of


def test_gated_delta_net_on_one_gpu(results: Results) -> None:
    (errors_of,) = results["hybrid"]
    assert_backends_agree(errors_of, HYBRID_BACKENDS)


def test_gated_delta_net_by_flashqla_on_one_gpu(tmp_path: Path) -> None:
    shape = GDNShape(key_heads=2, value_heads=4, key_dim=128, value_dim=128, conv_width=4)
    gpu_runtime = runtime("cuda", torch.cuda.get_device_capability())
    try:
        check_runtime(GDNConfig(backend="flashqla"), gpu_runtime, "bfloat16", shape)
    except ConfigError as refused:
        pytest.skip(str(refused))
    folder = make_model(tmp_path / "wide", "qwen3_5_text", tied=True, seed=5, changes=WIDE)
    backends = ("fla", "flashqla")
    (errors_of,) = run_ranks("tests.train.test_gpu:hybrid_on_gpu", 1, folder, backends)
    assert_backends_agree(errors_of, backends)
    assert ["flash-qla" in kernels for kernels in errors_of] == [False, True]


def same_bits(world: RankWorld, folder: Path) -> list[list[bytes]]:
    """Return the weights of two runs, each after three deterministic steps."""
    weights_of_runs: list[list[bytes]] = []
    for _ in range(2):
        actor = actor_on_gpu(world, folder, dtype="bfloat16", algo=SftConfig(), deterministic=True)
        for seed in range(3):
            train(actor, Layout(), seed)
        weights = [p.detach().cpu().view(torch.uint8).numpy().tobytes() for p in actor.model.parameters()]
        weights_of_runs.append(weights)
    return weights_of_runs


def test_a_deterministic_gpu_gives_the_same_bits_twice(results: Results) -> None:
    ((first, second),) = results["same bits"]
    assert len(first) == len(second) > 30
    assert first == second or not has_values()


@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is None, reason="needs transformer_engine")
@pytest.mark.parametrize("cp", [1, 2])
def test_transformer_engine_attends_as_torch_does(cp: int, folders: dict[str, Path]) -> None:
    if cp > torch.cuda.device_count():
        pytest.skip(f"needs {cp} GPUs")
    for result in run_ranks("tests.train.te:on_gpu", cp, folders["tied"], cp):
        assert (result["torch"]["core"], result["te"]["core"]) == ("PackedAttention", "TEAttention")
        if has_values():
            assert {name: error for name, error in result["core"].items() if error > 2e-2} == {}  # two bfloat16 kernels
            for name in ("torch", "te"):
                assert result[name]["grad"] < 0.08 and result[name]["score"] < 0.3, result
