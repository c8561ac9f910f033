"""``fla`` backend with fla's real Triton kernels, on a CPU through Triton's interpreter, in a separate process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.train.state_passing import HV, K, V

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[2]
LOCK = ROOT / "scripts" / "requirements" / "fla_interpreter.lock"
PREPARED = Path(sys.prefix) / "fla_interpreter"  # made by scripts/setup.sh
FLOAT32, FLOAT16 = 2e-5, 5e-3
SECONDS = 300
VARIABLES = {
    "OMP_NUM_THREADS": "1",  # the process forks ranks
    "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
    "TORCHDYNAMO_DISABLE": "1",  # fla's activations, which do not run here, would import torch's compiler
}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the results of ``tests.gdn.interpreted``, run with an installed FlashQLA that must not be called."""
    folder = tmp_path_factory.mktemp("fla")
    trap = folder / "flash_qla"
    trap.mkdir()
    (trap / "__init__.py").write_text("raise RuntimeError('FlashQLA was imported')")
    packages = PREPARED if PREPARED.is_dir() else install(folder / "packages")
    for package in packages.iterdir():
        (folder / package.name).symlink_to(package)
    result = subprocess.run(
        [sys.executable, "-m", "tests.gdn.interpreted", str(folder)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "plugins")]), **VARIABLES},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout.splitlines()[-1])


def install(folder: Path) -> Path:
    """Install fla-core and einops into ``folder``, as setup.sh does into ``PREPARED``; return the folder."""
    uv = Path(sys.executable).with_name("uv")
    command = [uv, "pip", "install", "--quiet", "--no-deps", "--require-hashes", "-r", LOCK, "--target", folder]
    subprocess.run(command, check=True, timeout=SECONDS)
    return folder


def test_values_and_gradients(measured: dict[str, Any]) -> None:
    assert len(measured["rule"]) == 5
    for name, parts in measured["rule"].items():
        assert max(parts.values()) <= (FLOAT16 if name == "half precision" else FLOAT32), (name, parts)


def test_convolution(measured: dict[str, Any]) -> None:
    assert len(measured["conv"]) == 2
    for name, parts in measured["conv"].items():
        assert max(parts) <= FLOAT32, (name, parts)


def test_ranks_share_a_stream_by_flas_context_parallelism(measured: dict[str, Any]) -> None:
    assert len(measured["ranks"]) == 2
    for rank in measured["ranks"]:
        assert len(rank["errors"]) == 3
        for name, parts in rank["errors"].items():
            assert parts.keys() == {"out", "x", "gates", "weight"}
            assert max(parts.values()) <= FLOAT32, (name, parts)
        assert rank["numbers"] == [HV * K * (K + V)] * 2 * len(rank["errors"])  # one gather forward, one backward


def test_a_gradient_that_stops_at_a_rank_border_is_detected(measured: dict[str, Any]) -> None:
    faults = [rank["fault"] for rank in measured["ranks"]]
    assert max(fault["out"] for fault in faults) <= FLOAT32 and max(fault["x"] for fault in faults) > 0.01, faults


def test_fla_does_not_dispatch_to_flashqla(measured: dict[str, Any]) -> None:
    assert measured["dispatch before"] == "flash_qla"  # fla's default dispatch
    assert measured["dispatch after"] is None and measured["switch"] == "0"
    assert measured["dispatched"] == []
    assert "fla-core 0.6.0" in measured["kernels"] and "triton" in measured["kernels"]


def test_fla_is_not_importable_in_this_environment() -> None:
    assert not any(Path(entry).joinpath("fla").exists() for entry in sys.path if entry)
