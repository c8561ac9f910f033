"""+recipe=quickstart_gdn and quickstart_next, shortened: they learn, engine and trainer agree, the export is the model.

The first on a trainer of two tensor parallel ranks, and, as the language part of a vision model, of two context parallel
ones; the second on one rank.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from slime_like.util.deadline import Deadline
from tests.e2e import checks
from tests.e2e.conftest import BRISK, Warm, begin_warm_start
from tests.e2e.conftest import warmed as warm_started
from tests.e2e.runs import REPOSITORY, metrics, train
from tests.e2e.vision import add_vision, carried

pytestmark = pytest.mark.e2e
SFT_STEPS = 160
ROLLOUTS = 5
# Half of the recipe's prompts, and a fifth of what holds the policy near its start: it learns within a few rollouts.
SMALL = ("rollout.batch_size=32", "algo.kl_loss_coef=0.1")
# The learning rate is 0 in the last step: the weights that sampled the last rollout are those of the export.
SHAPE = (
    "optim.schedule=wsd",
    "optim.min_lr=0",
    "optim.warmup_steps=0",
    f"optim.decay_steps={ROLLOUTS}",
    "optim.wsd_decay_steps=1",
)
RISE = 0.2  # of 100 held-out problems: four times the standard error
RECIPES = ("quickstart_gdn", "quickstart_next")
LAYERS = {"attention", "gdn", "mlp", "all"}


@dataclass(frozen=True, slots=True)
class Case:
    """A recipe on a layout of the trainer."""

    recipe: str
    layout: tuple[str, ...] = ()
    vision: bool = False


CASES = {
    "quickstart_gdn tp2": Case("quickstart_gdn", ("parallel.tp=2",)),
    "quickstart_gdn cp2, a vision model": Case("quickstart_gdn", ("parallel.cp=2",), vision=True),
    "quickstart_next": Case("quickstart_next"),
}


@pytest.fixture(scope="module")
def warm_models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Warm]:
    """Both warm starts, side by side: each is one rank."""
    folders = {recipe: tmp_path_factory.mktemp(recipe) for recipe in RECIPES}
    begun = {recipe: begin_warm_start(folder, f"{recipe}_sft", SFT_STEPS, *BRISK) for recipe, folder in folders.items()}
    return {recipe: warm_started(folders[recipe], training) for recipe, training in begun.items()}


@pytest.mark.parametrize("name", CASES)
def test_a_hybrid_model_learns(name: str, warm_models: Mapping[str, Warm], tmp_path: Path) -> None:
    case, run_dir = CASES[name], tmp_path / "run"
    warm = warm_models[case.recipe]
    model = [f"model.hf_checkpoint={add_vision(warm.hf, tmp_path / 'vision')}"] if case.vision else []
    done = train(
        f"+recipe={case.recipe}",
        *warm.overrides,
        *model,
        *SMALL,
        *SHAPE,
        *case.layout,
        f"run.dir={run_dir}",
        f"loop.num_rollout={ROLLOUTS}",
        "evaluation.interval=null",
        "run.save_hf=true",
        "run.dump_rollouts=true",
        log=tmp_path / "log",
    )
    assert done.code == 0, done.output
    assert f"Gated DeltaNet ran on torch: torch {torch.__version__}" in done.output
    shared = "; model.gdn.cp_mode=head (tp 1 * cp 2 divides"  # what the trainer says, beside the plan
    assert (shared in done.output) == ("parallel.cp=2" in case.layout)
    rows = metrics(run_dir)
    checks.check_consistency(rows, cached=False)
    checks.check_documented(rows)
    checks.check_guard(rows)
    before, after = rows[0]["eval/arithmetic"], rows[-1]["eval/arithmetic"]
    assert after >= before + RISE, f"held-out accuracy {before} -> {after}"
    for row in rows:
        left = {kind: row[f"probe/logprob_abs_diff_max/{kind}"] for kind in LAYERS}
        assert max(left.values()) <= checks.MAX_LOGPROB_DIFFERENCE
    checks.check_export(run_dir, ROLLOUTS - 1, {ROLLOUTS - 1}, temperature=1.0)
    if case.vision:
        kept, found = carried(tmp_path / "vision"), carried(run_dir / "hf")
        assert kept.keys() == found.keys() and {name.split(".")[0] for name in kept} == {"model", "mtp"}
        assert all(torch.equal(found[name], tensor) for name, tensor in kept.items())


REFUSED = ("+recipe=quickstart_gdn", "--qwen-gdn-backend", "flashqla")
REFUSED_S = 7.5  # it takes half a second; a first rollout, engine and trainer before it, more than ten
AUDITED = """
import runpy, sys

def note(event, args):
    if event in ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system"):
        print(event, args[1][0] if event == "subprocess.Popen" else "", flush=True)
    if event == "import" and args[0] in ("ray", "sglang", "torch", "multiprocessing"):  # of the driver, too
        print("imported", args[0], flush=True)

sys.addaudithook(note)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_kernels_that_cannot_run_here_end_the_run_before_it_starts(tmp_path: Path) -> None:
    """In a folder of its own: one message soon, nothing written, no process but the driver and its question to the GPU's driver."""
    command = [str(REPOSITORY / "train.py"), *REFUSED]
    plain, audited = (
        subprocess.run(
            [sys.executable, *how, *command],
            cwd=tmp_path,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            timeout=Deadline("test", "a refusal", REFUSED_S).limit,
            check=False,
        )
        for how in ((), ("-c", AUDITED))
    )
    for done in (plain, audited):
        assert done.returncode == 2, done.stdout + done.stderr
        (line,) = done.stderr.splitlines()
        assert line.startswith("ConfigError: model.gdn.backend=flashqla on a CPU: "), line
        assert "--qwen-gdn-backend torch" in line
    assert plain.stdout == ""
    assert audited.stdout.split() == ["os.fork", "subprocess.Popen", "nvidia-smi"], "the driver, and its one question"
    assert list(tmp_path.iterdir()) == []
