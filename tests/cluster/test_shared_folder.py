"""Nodes of the trainer's ranks that do not share run.dir with the driver."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from slime_like.cluster.start import shared_folder
from slime_like.cluster.start.shared_folder import find_separate_nodes
from slime_like.cluster.workers import trainer_worker
from slime_like.cluster.workers.trainer_worker import RankWorker
from slime_like.errors import ConfigError
from slime_like.util.deadline import Deadline


class TwoRanks:
    """Fake group whose ranks see the driver's folder as ``folders``."""

    def __init__(self, *folders: Path, role: str = "trainer") -> None:
        self._folders = {f"{role} rank {rank}": folder for rank, folder in enumerate(folders)}
        self._workers: dict[str, Any] = {name: object.__new__(RankWorker) for name in self._folders}

    def start(self, method: Any, argument: Any) -> dict[str, Any]:
        folders = self._folders.items() if isinstance(argument, str) else ()
        paths = {name: str(folder / Path(argument).name) for name, folder in folders}
        return {name: method(worker, paths.get(name, argument)) for name, worker in self._workers.items()}

    @property
    def separate_nodes(self) -> list[Any]:
        return [getattr(worker, "separate_nodes", ()) for worker in self._workers.values()]


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Return the driver's folder and that of another node."""
    monkeypatch.setattr(trainer_worker, "_own_address", lambda: "10.0.0.2")
    monkeypatch.setattr(trainer_worker, "APPEAR_S", 0.01)
    monkeypatch.setattr(shared_folder, "wait_all", lambda refs, *_: refs)
    run_dir, rank_dir = tmp_path / "run", tmp_path / "other"
    for folder in (run_dir, rank_dir):
        folder.mkdir()
    return run_dir, rank_dir


def test_ranks_are_told_which_nodes_have_a_folder_of_their_own(folders: tuple[Path, Path]) -> None:
    run_dir, rank_dir = folders
    ranks: Any = TwoRanks(run_dir, rank_dir)
    assert find_separate_nodes(run_dir, [ranks], Deadline("driver", "connect", 1)) == ["10.0.0.2"]
    assert ranks.separate_nodes == [("", "10.0.0.2")] * 2
    shutil.rmtree(rank_dir)
    rank_dir.symlink_to(run_dir)
    ranks = TwoRanks(run_dir, rank_dir)
    assert find_separate_nodes(run_dir, [ranks], Deadline("driver", "connect", 1)) == []
    assert ranks.separate_nodes == [(), ()]
    assert list(run_dir.iterdir()) == [], "the marker is removed"


def test_a_folder_that_rank_0_does_not_share_is_refused(folders: tuple[Path, Path]) -> None:
    run_dir, rank_dir = folders
    ranks: Any = TwoRanks(rank_dir, run_dir)
    with pytest.raises(
        ConfigError, match=r"is not shared with 10\.0\.0\.2 \(trainer rank 0\).*start train.py on 10\.0\.0\.2"
    ):
        find_separate_nodes(run_dir, [ranks], Deadline("driver", "connect", 1))
    assert list(run_dir.iterdir()) == [], "the marker is removed"


@pytest.mark.parametrize("actor_is_separate", [False, True])
def test_the_driver_is_moved_only_to_a_node_with_every_rank_0(
    actor_is_separate: bool, folders: tuple[Path, Path]
) -> None:
    """If the actor's rank 0 sees the folder, it may not see one on the node of the critic's rank 0."""
    run_dir, rank_dir = folders
    actor: Any = TwoRanks(rank_dir if actor_is_separate else run_dir, run_dir)
    critic: Any = TwoRanks(rank_dir, rank_dir, role="critic")
    with pytest.raises(ConfigError, match="is not shared with") as error_info:
        find_separate_nodes(run_dir, [actor, critic], Deadline("driver", "connect", 1))
    message = str(error_info.value)
    assert ("start train.py on 10.0.0.2" in message) == actor_is_separate
    assert ("(critic rank 0)" in message) != actor_is_separate
    assert message.endswith("set run.dir to a folder of a file system that all nodes mount at the same path")
