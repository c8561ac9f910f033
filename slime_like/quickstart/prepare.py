"""``run.prepare`` of the default job: makes its data and model on the spot, and runs its warm start once."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

from slime_like.config.algo import SftConfig
from slime_like.config.root import TrainConfig
from slime_like.deadline import Deadline
from slime_like.errors import ConfigError, WorkerError
from slime_like.quickstart.arithmetic import ArithmeticSpec, write_datasets
from slime_like.quickstart.model import ModelSpec, write_model

WARM_START_RECIPE = "quickstart_sft"
WARM_START_DEADLINE_S = 1800.0
STAMP = "made_from.json"
REPOSITORY = Path(__file__).resolve().parents[2]


def prepare(cfg: TrainConfig) -> None:
    """Make what ``cfg`` needs and is not there: datasets and random model; for GRPO also the warm-started model.

    What was made carries a stamp of the sizes and sources it was made from, and is made again when they change.
    """
    assets = Path(cfg.data.train).parent
    _make_assets(assets)
    if not isinstance(cfg.algo, SftConfig):
        _warm_start(cfg, assets)


def _make_assets(folder: Path) -> None:
    stamp = _stamp()
    if _read_stamp(folder) == stamp:
        return
    started = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    write_datasets(folder, ArithmeticSpec())
    write_model(folder / "model", ModelSpec())
    (folder / STAMP).write_text(json.dumps(stamp))
    _say(f"wrote datasets and a random model to {folder} in {time.monotonic() - started:.1f} s")


def _warm_start(cfg: TrainConfig, assets: Path) -> None:
    exported = Path(cfg.model.hf_checkpoint)
    run_dir = exported.parent
    stamp = _stamp() | {"recipe": _digest(REPOSITORY / "configs" / "recipe" / f"{WARM_START_RECIPE}.yaml")}
    if exported.exists() and _read_stamp(run_dir) == stamp:
        return
    started = time.monotonic()
    _say(f"warm start: supervised fine-tuning on demonstrations, once; log in {run_dir}")
    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.mkdir(parents=True)
    command = [
        sys.executable,
        str(REPOSITORY / "train.py"),
        f"+recipe={WARM_START_RECIPE}",
        f"run.dir={run_dir}",
        f"model.hf_checkpoint={assets / 'model'}",
        f"data.train={assets / 'sft.jsonl'}",
        f"placement.device={cfg.placement.device}",
        "metrics.console=plain",
    ]
    deadline = Deadline("quickstart", "warm start", WARM_START_DEADLINE_S)
    try:
        subprocess.run(command, check=True, timeout=deadline.limit, cwd=Path.cwd())
    except subprocess.TimeoutExpired as error:
        raise deadline.exceeded("the warm start") from error
    except subprocess.CalledProcessError as error:
        raise WorkerError(
            f"the warm start ended with exit code {error.returncode}; its messages stand above"
        ) from error
    if exported != run_dir / "hf":
        raise ConfigError(
            f"model.hf_checkpoint={cfg.model.hf_checkpoint!r} of the quickstart must be a folder named hf"
        )
    (run_dir / STAMP).write_text(json.dumps(stamp))
    _say(f"warm start done in {time.monotonic() - started:.0f} s")


def _stamp() -> dict[str, object]:
    """What the files follow from."""
    return {
        "arithmetic": asdict(ArithmeticSpec()),
        "model": asdict(ModelSpec()),
        "source": [_digest(Path(__file__).parent / name) for name in ("arithmetic.py", "model.py")],
    }


def _read_stamp(folder: Path) -> object:
    try:
        return json.loads((folder / STAMP).read_text())
    except (OSError, ValueError):
        return None


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _say(text: str) -> None:
    sys.stdout.write(f"quickstart: {text}\n")
    sys.stdout.flush()
