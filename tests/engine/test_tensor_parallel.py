"""Engine of two tensor-parallel ranks: results, commits, isolation, death, cleanup, and loss of its parent."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from slime_like.errors import EngineError, EngineLost
from slime_like.printable import SECRET
from slime_like.rollout.engine.processes import members, pids_of_part
from tests.e2e.leftovers import beyond_loopback, is_private, listened_on, unix_sockets
from tests.engine.closeness import assert_close
from tests.engine.conftest import ADMIN_KEY, Models, RunningEngine, make_sampling, prompt

pytestmark = pytest.mark.engine


def test_two_ranks_agree_with_transformers(engine_tp2: RunningEngine, models: Models) -> None:
    ids = prompt(30)
    assert "module by module, as tp_size is 2" in engine_tp2.server.decode_method()
    for version, name in enumerate("AB"):
        if version:
            engine_tp2.run(engine_tp2.push(models.tensors(name), version))
        completions = engine_tp2.run(engine_tp2.client.generate(ids, [1, 2, 3], make_sampling(0.7)))
        assert len({tuple(c.token_ids.tolist()) for c in completions}) == 3
        for completion in completions:
            sequence = np.concatenate([ids, completion.token_ids])
            expected = models.logprobs(name, sequence, 0.7)[-len(completion.token_ids) :]
            assert_close(completion.logprobs, expected)
        (scores,) = engine_tp2.run(engine_tp2.client.score([ids], 0.7))
        assert_close(scores, models.logprobs(name, ids, 0.7))


def test_ranks_use_batch_scheduling(engine_tp2: RunningEngine) -> None:
    """The process that started the engine had the default policy."""
    schedulers = pids_of_part(engine_tp2.server.pid, "scheduler")
    assert [os.sched_getscheduler(pid) for pid in schedulers] == [os.SCHED_BATCH] * 2


def test_a_commit_is_checked_on_every_rank(engine_tp2: RunningEngine, models: Models) -> None:
    tensors = models.tensors("A")
    del tensors["model.layers.1.self_attn.o_proj.weight"]
    name = r"model\.layers\.1\.self_attn\.o_proj\.weight \(2048 of 2048 elements\)"
    with pytest.raises(EngineError, match=f"rank 0: 1 parameters: {name}; rank 1: 1 parameters: {name}"):
        engine_tp2.run(engine_tp2.push(tensors, 2))
    engine_tp2.run(engine_tp2.push(models.tensors("A"), 3))


def test_other_users_cannot_reach_an_engine(engine_tp2: RunningEngine) -> None:
    """The engine listens on loopback and in a private folder; its key is on no command line and not in its log."""
    pids = [int(process.name) for process in members(engine_tp2.server.pid)]
    addresses = listened_on(pids).values()
    assert engine_tp2.server.url.removeprefix("http://") in addresses
    assert beyond_loopback(addresses) == []
    assert [path for path in unix_sockets(pids) if not is_private(path)] == []
    commands = [Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace") for pid in pids]
    log = Path(f"/proc/{engine_tp2.server.pid}/fd/1").read_text(errors="replace")
    assert len(commands) > 2 and ADMIN_KEY not in "\n".join(commands)
    assert "server_args={" in log and f"'admin_api_key': '{SECRET}'" in log and ADMIN_KEY not in log


def test_a_dead_engine_is_lost_and_its_server_names_the_cause(engine_tp2: RunningEngine) -> None:
    os.killpg(engine_tp2.server.pid, signal.SIGKILL)
    with pytest.raises(EngineLost, match=r"engine tp2 at http.*/generate: "):
        engine_tp2.run(engine_tp2.client.generate(prompt(3), [0], make_sampling()))
    assert re.search(r"engine at http.* was killed by SIGKILL; end of .*\.log", engine_tp2.server.cause_of_death())
    assert not engine_tp2.server.alive()
    with pytest.raises(EngineLost):
        engine_tp2.run(engine_tp2.client.health())


def test_an_engine_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    """The parent is killed before the engine is ready; the engine's scratch folder is removed too."""
    program = (
        "import os, signal\n"
        "from slime_like.config.schema.resolved import EngineSpec\n"
        "from slime_like.rollout.engine.server import EngineServer\n"
        f"spec = EngineSpec('nowhere', 'cpu', 'float32', 1, 64, 0, {str(tmp_path / 'log')!r}, 10, 10)\n"
        "server = EngineServer(spec, admin_key='key')\n"
        "server.start()\n"
        "print(server.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment
    )
    assert result.returncode == -signal.SIGKILL
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int(result.stdout)).wait(60)
    assert not list(tmp_path.glob("slime_like-engine-*")), "the engine's scratch folder is left"


def test_a_stopped_engine_leaves_nothing_behind(engine_tp2: RunningEngine) -> None:
    engine_tp2.server.stop()
    assert not Path(f"/proc/{engine_tp2.server.pid}").exists()
    segments = engine_tp2.server.segments
    assert {path.name.split("_")[1] for path in segments} >= {"loads", "shm"}  # sglang_loads_*, sgl_shm_*
    assert [path for path in segments if path.exists()] == []
    port = int(engine_tp2.server.url.split(":")[-1])
    with socket.socket() as client_socket:
        assert client_socket.connect_ex(("127.0.0.1", port)) == errno.ECONNREFUSED
