"""Processes of benchmarks: their output is read line by line, every wait has a limit, and no process remains."""

from __future__ import annotations

import importlib
import subprocess
import sys
import time
from functools import partial
from typing import Any

import psutil
import pytest
import torch.multiprocessing as mp

from benchmarks.processes import join_ranks, read_lines
from slime_like.errors import DeadlineExceeded


def start(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE, text=True)


def test_lines_and_exit_code_of_a_process() -> None:
    process = start("print('a'); print('b'); raise SystemExit(3)")
    assert list(read_lines(process)) == ["a\n", "b\n"]
    assert process.returncode == 3


@pytest.mark.parametrize(
    "hang",
    ["import time; time.sleep(60)", "import os, time; os.close(1); time.sleep(60)"],
    ids=["output stays open", "output is closed"],
)
def test_a_process_that_does_not_end_is_stopped(hang: str) -> None:
    process = start(hang)
    start_time = time.monotonic()
    with pytest.raises(SystemExit, match=r"-S -c \.\.\. did not end within 0\.5 s"):
        list(read_lines(process, limit_s=0.5, stop_s=20))
    assert process.returncode == -15
    assert time.monotonic() - start_time < 30


def test_a_process_that_ignores_sigterm_is_killed() -> None:
    process = start(
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)"
    )
    lines = read_lines(process, stop_s=0.5)
    assert next(lines) == "ready\n"
    lines.close()
    assert process.returncode == -9


def hang(rank: int) -> None:
    time.sleep(60 * rank)


def fail(rank: int) -> None:
    raise ValueError(f"rank {rank} failed")


def test_ranks_that_do_not_end_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIME_LIKE_DEADLINE_FACTOR", "1")
    ranks = mp.start_processes(hang, nprocs=2, join=False, start_method="fork")
    assert ranks is not None
    with pytest.raises(DeadlineExceeded, match=r"benchmark waited .* for its ranks"):
        join_ranks(ranks, limit_s=0.5)
    assert not any(psutil.pid_exists(pid) for pid in ranks.pids())


def test_ranks_of_a_benchmark_that_hang_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIME_LIKE_DEADLINE_FACTOR", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # set by the benchmark, restored after the test
    ranks = mp.start_processes(hang, nprocs=2, join=False, start_method="fork")
    assert ranks is not None
    flow_prefetch: Any = importlib.import_module("benchmarks.flow_prefetch")
    monkeypatch.setattr(mp, "start_processes", lambda *args, **kwargs: ranks)
    monkeypatch.setattr(flow_prefetch, "join_ranks", partial(join_ranks, limit_s=0.5))
    with pytest.raises(DeadlineExceeded):
        flow_prefetch.main([])
    assert not any(psutil.pid_exists(pid) for pid in ranks.pids())


def test_the_error_of_a_failed_rank_is_raised() -> None:
    ranks = mp.start_processes(fail, nprocs=1, join=False, start_method="fork")
    with pytest.raises(mp.ProcessRaisedException, match="rank 0 failed"):
        join_ranks(ranks, limit_s=60)
