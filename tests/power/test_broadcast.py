"""A push by ``broadcast`` to two engines, of which one loses power in the middle of a bucket."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from slime_like.util.deadline import FACTOR_VARIABLE
from tests.nodes.machine import Network
from tests.power.broadcast_push import PEER_TIMEOUT_S

LIMIT_S = 90.0
REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_loss_ends_the_push_and_leaves_the_other_engine_and_the_watchdog_alone(net: Network) -> None:
    sender, lost_node, other_node = (net.add() for _ in range(3))
    command = [sys.executable, "-m", "tests.power.broadcast_push"]
    process = subprocess.Popen(
        [*command, *(f"{node.name}={node.address}" for node in (sender, lost_node, other_node))],
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env=os.environ | {FACTOR_VARIABLE: "1", "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    limit = threading.Timer(LIMIT_S, os.killpg, (process.pid, signal.SIGKILL))
    limit.start()
    try:
        assert process.stdout is not None
        lines: list[str] = []
        for line in process.stdout:
            lines.append(line.strip())
            if lines[-1] == "sending":
                lost_node.disconnect()
            if lines[-1] == "end":
                break
        output = "\n".join(lines)
        noticed, closed = (float(seconds) for seconds in re.findall(r"^(?:lost|closed) after ([\d.]+) s", output, re.M))
        assert noticed < 4 * PEER_TIMEOUT_S, output
        assert closed < PEER_TIMEOUT_S, output
        assert f"{lost_node.address} at http://{lost_node.address}:8000/update_weights_from_distributed" in output
        assert "oldest op in flight: None" in output
        assert lines[-2:] == ["sent 8 tensors to the other engine", "end"]
    finally:
        limit.cancel()
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(LIMIT_S)
