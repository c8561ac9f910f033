"""Check that run.dir is shared by the nodes of the trainer's ranks."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from slime_like.cluster.start import shared_folder
from slime_like.cluster.start.shared_folder import check_shared
from slime_like.cluster.workers import trainer_worker
from slime_like.cluster.workers.trainer_worker import RankWorker
from slime_like.errors import ConfigError
from slime_like.util.deadline import Deadline


class TwoRanks:
    """Fake group whose second rank is on a node that has ``folder`` in place of the driver's."""

    def __init__(self, run_dir: Path, folder: Path) -> None:
        self._run_dir, self._folder = run_dir, folder

    def start(self, method: Any, path: str) -> dict[str, str]:
        worker: Any = object.__new__(RankWorker)
        folders = {"trainer rank 0": self._run_dir, "trainer rank 1": self._folder}
        return {name: method(worker, str(folder / Path(path).name)) for name, folder in folders.items()}


def test_a_node_without_the_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_worker, "_own_address", lambda: "10.0.0.2")
    monkeypatch.setattr(trainer_worker, "APPEAR_S", 0.01)
    monkeypatch.setattr(shared_folder, "wait_all", lambda refs, *_: refs)
    run_dir, other = tmp_path / "run", tmp_path / "other"
    for folder in (run_dir, other):
        folder.mkdir()
    groups: Any = [TwoRanks(run_dir, other)]
    with pytest.raises(ConfigError, match=r"is not shared with 10\.0\.0\.2 \(trainer rank 1\): .*actor_num_nodes=1"):
        check_shared(run_dir, groups, Deadline("driver", "connect", 1))
    shutil.rmtree(other)
    other.symlink_to(run_dir)
    check_shared(run_dir, groups, Deadline("driver", "connect", 1))
    assert list(run_dir.iterdir()) == [], "the marker is removed"
