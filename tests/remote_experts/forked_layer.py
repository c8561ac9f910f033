"""Layer with local and remote experts, whose worker is a fork of the test process: sums and weight updates."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Generator
from dataclasses import replace
from typing import Any

import numpy as np
import psutil
import torch

from slime_like.config.schema.remote_experts import RemoteOptions
from slime_like_plugins.remote_experts.compute import expert_sums
from slime_like_plugins.remote_experts.experts import RemoteExperts
from slime_like_plugins.remote_experts.process import ExpertProcess
from slime_like_plugins.remote_experts.routing import ExpertRows, split
from slime_like_plugins.remote_experts.serving import WorkerSettings
from slime_like_plugins.remote_experts.worker import serve
from tests.remote_experts.workers import SHAPES, reference, weights_of

LAYER = 3
ROWS = ExpertRows(5, (1, 4))  # two of five are remote
MATRICES = weights_of(replace(SHAPES, layers=(LAYER,), num_experts=(5,)))[LAYER]
LOCAL = {name: matrix[[0, 2, 3]] for name, matrix in MATRICES.items()}
REMOTE = {name: matrix[[1, 4]] for name, matrix in MATRICES.items()}
DEADLINE_S = 0.5
OPTIONS = RemoteOptions(count=2, capacity=64, deadline_s=DEADLINE_S)
PATIENT = replace(OPTIONS, deadline_s=20.0)
BOUNDS = {"float32": 1e-6, "float16": 4e-3, "bfloat16": 3e-2}  # maximum errors of sums, relative to the largest sum


def batch(num: int = 40, seed: int = 0) -> tuple[Any, Any, Any]:
    """Return hidden states, ids and weights of tokens with two experts each."""
    rng = np.random.default_rng(seed)
    x = torch.from_numpy(rng.standard_normal((num, SHAPES.hidden)).astype(np.float32))
    ids = np.array([rng.permutation(5)[:2] for _ in range(num)], np.int32)
    return x, ids, rng.random((num, 2)).astype(np.float32)


def update(experts: RemoteExperts, factor: float = 1.0) -> str:
    """Push weights as SGLang's loaders do; return the worker's failure, or "" on success."""
    experts.begin()
    for layer, matrices in ((0, weights_of(SHAPES)[0]), (LAYER, REMOTE)):
        for name, matrix in matrices.items():
            for expert, rows in enumerate(matrix * factor):
                half = len(rows) // 2
                experts.write(layer, name, expert, 0, rows[:half])
                experts.write(layer, name, expert, half, rows[half:])
    incomplete, failure = experts.unwritten()
    assert not incomplete
    return failure or experts.commit()


def assert_sums(
    experts: RemoteExperts, remote_factor: float = 1.0, seed: int = 0, num: int = 40, bound: float = 1e-6
) -> torch.Tensor:
    """Assert that the sums of a batch equal those of all experts in one process; return the sums."""
    x, ids, weights = batch(num, seed)
    local, buckets = split(ids, weights, ROWS)
    sums = experts.add_sums(
        LAYER, x, buckets, lambda feed: expert_sums(x, local, weights, LOCAL["w13"], LOCAL["w2"], feed)
    )
    every = {name: matrix.clone() for name, matrix in MATRICES.items()}
    for matrix in every.values():
        matrix[[1, 4]] *= remote_factor
    expected = reference(x, ids, weights, every)
    np.testing.assert_allclose(sums, expected, rtol=0, atol=bound * float(expected.abs().max()))
    return sums


class ForkedProcess(ExpertProcess):
    """Worker process that is forked, because importing torch takes seconds."""

    settings = WorkerSettings()

    def __init__(self, origin: object) -> None:
        self.socket, self.theirs = socket.socketpair()
        self._pid = os.fork()
        if not self._pid:
            try:
                self.socket.close()
                self.serve()
            finally:
                os._exit(0)
        self.theirs.close()
        self._process: Any = ForkedChild(self._pid)

    def serve(self) -> None:
        """Serve the engine in the worker."""
        torch.set_num_threads(1)
        serve(self.theirs, self.settings)

    @property
    def pid(self) -> int:
        return self._pid


class ForkedChild:
    """The part of ``subprocess.Popen`` that ends a child."""

    def __init__(self, pid: int) -> None:
        self._child = psutil.Process(pid)

    def wait(self, timeout: float) -> None:
        """Wait until the child has ended."""
        try:
            self._child.wait(timeout)
        except psutil.TimeoutExpired as error:
            raise subprocess.TimeoutExpired("worker", timeout) from error

    def send_signal(self, number: int) -> None:
        """Send a signal if the child has not ended."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._child.send_signal(number)


@contextlib.contextmanager
def experts_of(options: RemoteOptions) -> Generator[RemoteExperts]:
    """Yield remote experts with committed weights in a worker process."""
    experts = RemoteExperts(options, 0)
    try:
        experts.start()
        experts.open(replace(SHAPES, capacity=options.capacity))
        assert update(experts) == ""
        yield experts
    finally:
        experts.close()
