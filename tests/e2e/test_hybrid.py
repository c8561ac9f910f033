"""+recipe=quickstart_gdn and quickstart_next, shortened: the models learn, engine and trainer agree, the exports are correct.

Both begin with random weights. quickstart_gdn runs on two tensor parallel ranks, as the language part of a vision model,
and its engine shards the weights of grouped queries over two data-parallel attention ranks (FlowMLA). quickstart_next runs on two
context parallel ranks, which replay the experts of the engine; half of the engine's experts are in a worker, which is killed once.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from slime_like.quickstart.arithmetic import ArithmeticSpec
from slime_like.quickstart.model import GDN, NEXT, LinearSpec, ModelSpec, write_model
from slime_like.util.deadline import Deadline
from tests.e2e import checks
from tests.e2e.conftest import SMALL_ROLLOUTS
from tests.e2e.remote_workers import worker_killed_once, workers
from tests.e2e.runs import REPOSITORY, metrics, train
from tests.e2e.vision import add_vision, untrained_tensors
from tests.e2e.worker_server import forking_workers

pytestmark = pytest.mark.e2e
ROLLOUTS = 5
# The learning rate is 0 in the last step, so the weights that sampled the last rollout are the exported weights.
SHAPE = (
    "optim.lr=5e-3",
    "optim.schedule=wsd",
    "optim.min_lr=0",
    "optim.warmup_steps=0",
    f"optim.decay_steps={ROLLOUTS}",
    "optim.wsd_decay_steps=1",
)
MIN_RISE = 0.7  # minimum rise of the reward of 128 samples: four times the standard error
MAX_DIFFERENT = 0.01  # share of a layer's tokens for which rounding decides between experts
LAYERS = {"attention", "gdn", "mlp", "all"}


@dataclass(frozen=True, slots=True)
class LayoutCase:
    """A recipe on a layout of the trainer, and the shape of its model."""

    recipe: str
    model: ModelSpec
    layout: tuple[str, ...]
    vision: bool = False


FLOW_MLA = (
    "rollout.tp=2",
    "rollout.dp_attention=2",
    "rollout.flow_mla.enabled=true",
    "rollout.flow_mla.weights=[o_proj,qkv_proj]",
)
REMOTE_EXPERTS = ("rollout.remote_experts.count=4", "rollout.remote_experts.policy=respawn")
CASES = {
    "quickstart_gdn tp2, a vision model": LayoutCase(
        "quickstart_gdn",
        replace(GDN, linear=LinearSpec(full_attention_interval=2)),
        ("parallel.tp=2", *FLOW_MLA),
        vision=True,
    ),
    "quickstart_next cp2, experts replayed": LayoutCase(
        "quickstart_next", NEXT, ("parallel.cp=2", "algo.routing_replay=rollout", *REMOTE_EXPERTS)
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_hybrid_model_learns(name: str, tmp_path: Path) -> None:
    case, run_dir = CASES[name], tmp_path / "run"
    model = tmp_path / "model"
    write_model(model, replace(case.model, initializer_range=0.08))  # so large that every layer changes the logits
    if case.vision:
        model = add_vision(model, tmp_path / "vision")
    ArithmeticSpec().write(tmp_path)
    has_worker = REMOTE_EXPERTS[0] in case.layout
    with worker_killed_once(run_dir) if has_worker else nullcontext([]) as killed_pids:
        result = train(
            f"+recipe={case.recipe}",
            "run.prepare=null",
            f"model.hf_checkpoint={model}",
            f"data.train={tmp_path / 'train.jsonl'}",
            f"evaluation.datasets={{heldout: '{tmp_path / 'heldout.jsonl'}@[0:64]'}}",
            f"evaluation.interval={ROLLOUTS}",
            *("reward.name=tests.e2e.custom:num_digits", "reward.workers=1"),
            "algo.kl_loss_coef=0.1",  # a fifth of the recipe's
            *SMALL_ROLLOUTS,
            *SHAPE,
            *case.layout,
            f"run.dir={run_dir}",
            f"loop.num_rollout={ROLLOUTS}",
            "run.save_hf=true",
            "run.dump_rollouts=true",
            log=tmp_path / "log",
            environment=forking_workers(),
        )
    assert result.code == 0, result.output
    assert f"Gated DeltaNet ran on torch: torch {torch.__version__}" in result.output
    log = (run_dir / "logs" / "engine_0.log").read_text()
    assert log.count("FlowMLA shards o_proj, qkv_proj of 2 layers over 2 ranks") == 2 * (FLOW_MLA[0] in case.layout)
    cp_message = "; model.gdn.cp_mode=head (tp 1 * cp 2 divides"  # in the trainer's message, not in the plan's
    assert (cp_message in result.output) == ("parallel.cp=2" in case.layout)
    rows = metrics(run_dir)
    checks.check_consistency(rows, cached=False)
    checks.check_documented(rows)
    checks.check_guard(rows)
    rewards = [row["rollout/raw_reward"] for row in rows[1:]]
    assert rewards[-1] > rewards[0] + MIN_RISE, rewards
    scores = [row["eval/heldout"] for row in rows if "eval/heldout" in row]
    assert len(scores) == 2 and scores[1] > scores[0] + MIN_RISE, scores
    assert len(killed_pids) == has_worker and not workers()
    assert ("a new worker replaces it" in log) == has_worker
    if "algo.routing_replay=rollout" in case.layout:
        assert "train/routed_experts_differ_max" in rows[1]
    for row in rows:
        differences = {kind: row[f"probe/logprob_abs_diff_max/{kind}"] for kind in LAYERS}
        assert max(differences.values()) <= checks.MAX_LOGPROB_DIFFERENCE
        if "algo.routing_replay=rollout" in case.layout:
            assert row["probe/routed_experts_gap_max"] <= checks.MAX_LOGPROB_DIFFERENCE
            assert row["probe/logprob_abs_diff_max/own_experts"] <= checks.MAX_LOGPROB_DIFFERENCE
            assert row.get("train/routed_experts_differ_max", 0.0) <= MAX_DIFFERENT  # absent before the first rollout
    checks.check_export(run_dir, ROLLOUTS - 1, {ROLLOUTS - 1}, temperature=1.0)
    if case.vision:
        tensors, exported = untrained_tensors(model), untrained_tensors(run_dir / "hf")
        assert tensors.keys() == exported.keys() and {name.split(".")[0] for name in tensors} == {"model", "mtp"}
        assert all(torch.equal(exported[name], tensor) for name, tensor in tensors.items())


REFUSED_COMMAND = ("+recipe=quickstart_gdn", "--qwen-gdn-backend", "flashqla")
MAX_REFUSAL_S = 120.0  # a refusal takes half a second; AUDIT_SCRIPT detects a start of engine or trainer
AUDIT_SCRIPT = """
import runpy, sys

def note(event, args):
    if event in ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system"):
        print(event, args[1][0] if event == "subprocess.Popen" else "", flush=True)
    if event == "import" and args[0] in ("ray", "sglang", "torch", "multiprocessing"):  # imports of the driver, too
        print("imported", args[0], flush=True)

sys.addaudithook(note)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_kernels_that_cannot_run_here_end_the_run_before_it_starts(tmp_path: Path) -> None:
    """The run prints one message, writes nothing, and starts no process except the driver and nvidia-smi."""
    command = [str(REPOSITORY / "train.py"), *REFUSED_COMMAND]
    unaudited, audited = (
        subprocess.run(
            [sys.executable, *options, *command],
            cwd=tmp_path,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            timeout=Deadline("test", "a refusal", MAX_REFUSAL_S).limit,
            check=False,
        )
        for options in ((), ("-c", AUDIT_SCRIPT))
    )
    for result in (unaudited, audited):
        assert result.returncode == 2, result.stdout + result.stderr
        (line,) = result.stderr.splitlines()
        assert line.startswith("ConfigError: model.gdn.backend=flashqla on a CPU: "), line
        assert "--qwen-gdn-backend torch" in line
    assert unaudited.stdout == ""
    assert audited.stdout.split() == ["os.fork", "subprocess.Popen", "nvidia-smi"], (
        "the driver and its query of the GPU"
    )
    assert list(tmp_path.iterdir()) == []
