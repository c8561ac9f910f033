"""A push by ``broadcast`` to two engines, of which one loses power in the middle of a bucket."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from slime_like.util.deadline import FACTOR_VARIABLE
from tests.nodes.machine import Network
from tests.power.broadcast_push import PEER_TIMEOUT_S

LIMIT_S = 90.0
FOREIGN_ADDRESS = "192.0.2.1"  # of documentation (RFC 5737): no node has it
REPOSITORY = Path(__file__).resolve().parents[2]


@contextmanager
def push(*places: tuple[str, str], stderr: IO[str] | None = None) -> Generator[subprocess.Popen[str]]:
    """Run a push from and to these networks and addresses; it and its engines are killed at the end, and after ``LIMIT_S``."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.power.broadcast_push", *("=".join(place) for place in places)],
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        cwd=REPOSITORY,
        env=os.environ | {FACTOR_VARIABLE: "1", "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    limit = threading.Timer(LIMIT_S, os.killpg, (process.pid, signal.SIGKILL))
    limit.start()
    try:
        yield process
    finally:
        limit.cancel()
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(LIMIT_S)


@pytest.mark.slow
def test_the_loss_ends_the_push_and_leaves_the_other_engine_and_the_watchdog_alone(net: Network) -> None:
    nodes = [net.add() for _ in range(3)]
    lost_node = nodes[1]
    with push(*((node.name, node.address) for node in nodes)) as process:
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


@pytest.mark.slow
def test_an_engine_that_does_not_start_ends_the_push(net: Network, tmp_path: Path) -> None:
    node, log = net.add(), tmp_path / "stderr"
    engines = (node.name, node.address), (node.name, FOREIGN_ADDRESS)
    with log.open("w") as stderr, push((node.name, node.address), *engines, stderr=stderr) as process:
        assert process.stdout is not None
        assert process.stdout.read() == ""
        assert "an engine ended before it accepted connections" in log.read_text()
        assert process.wait(LIMIT_S) == 1, "the other engine kept the output open until the push was killed"
