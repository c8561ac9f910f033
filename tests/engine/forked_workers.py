"""Engines that fork their workers of remote experts, because the import of torch in a worker takes 4 s of CPU time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import BinaryIO, cast

import setproctitle

from slime_like.rollout.engine import main as engine
from slime_like_plugins.remote_experts import link
from slime_like_plugins.remote_experts.process import MODULE
from tests.engine.forked_engines import ForkedEngine, ForkedEngineServer
from tests.remote_experts.forked_layer import ForkedProcess

TARGET = f"{__name__}:main"


class WorkerOfRank(ForkedProcess):
    """Forked worker with the command line of a started one. It closes all files of the rank but its socket and log."""

    def serve(self) -> None:
        setproctitle.setproctitle(f"{sys.executable} -m {MODULE}")
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.closerange(3, self.theirs.fileno())
        os.closerange(self.theirs.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
        super().serve()


def main() -> None:
    """Run an engine that forks its workers."""
    link.ExpertProcess = WorkerOfRank
    engine.main()


class WorkerForkingServer(ForkedEngineServer):
    """``ForkedEngineServer`` whose engines fork their workers of remote experts."""

    def _spawn(self, log: BinaryIO, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        return cast("subprocess.Popen[bytes]", ForkedEngine(log, environment, TARGET))
