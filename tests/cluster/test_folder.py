"""Run folder: claimed by one run at a time, and refused with its key if it cannot be written."""

import errno
import fcntl
import os
from pathlib import Path

import pytest

from slime_like.cluster.start.folder import check_folder, claim_folder
from slime_like.config.load.loader import from_yaml
from slime_like.errors import ConfigError
from tests.cluster.run_folder import config


def test_a_folder_belongs_to_one_run_at_a_time(tmp_path: Path) -> None:
    cfg = config(tmp_path / "run")
    with claim_folder(cfg, tmp_path / "run"):
        assert from_yaml((tmp_path / "run" / "config.yaml").read_text()) == cfg
        with (
            pytest.raises(ConfigError, match=r"is in use by an active run"),
            claim_folder(cfg, tmp_path / "run"),
        ):
            pass
    with claim_folder(cfg, tmp_path / "run"):  # free again
        pass


def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    message = r"run\.dir=.*\.lock cannot be locked \(No locks available\).* on a file system with locks"
    with pytest.raises(ConfigError, match=message), claim_folder(config(tmp_path), tmp_path):
        pass


def test_a_folder_that_cannot_be_written_names_the_key(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ConfigError, match=r"run\.dir=.* cannot be written"),
        claim_folder(config(tmp_path), tmp_path / "file" / "x"),
    ):
        pass


def test_a_check_leaves_no_folder_behind(tmp_path: Path) -> None:
    check_folder(config(tmp_path / "a" / "b"))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "run").mkdir()
    check_folder(config(tmp_path / "run"))
    assert list(tmp_path.rglob("*")) == [tmp_path / "run"]


@pytest.mark.parametrize("run_dir", ["/proc/run", "/proc/self", "/dev/null/run", f"/{'x' * 300}/run"])
def test_a_place_without_folders_is_refused(run_dir: str) -> None:
    with pytest.raises(ConfigError, match=rf"run\.dir='{run_dir}' cannot be written \(.+\): choose another folder"):
        check_folder(config(Path(run_dir)))


def test_a_loop_of_links_is_refused(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    for run_dir in (tmp_path / "loop", tmp_path / "loop" / "run"):
        with pytest.raises(ConfigError, match=r"run\.dir=.* cannot be written"):
            check_folder(config(run_dir))


def test_a_folder_that_cannot_be_searched_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_search(path: Path, **_: object) -> bool:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "exists", no_search)
    with pytest.raises(ConfigError, match=r"run\.dir=.* cannot be written \(.*Permission denied.*\): choose another"):
        check_folder(config(tmp_path / "closed" / "run"))
