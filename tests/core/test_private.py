"""Private files in shared folders: links and folders of other users are refused, names are not predictable."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slime_like.cluster.plan.guard import ring_folder
from slime_like.cluster.start.folder import claim_folder
from slime_like.distributed.forensics.ring import PREFIX, Ring, sweep
from slime_like.errors import ConfigError, SlimeLikeError
from slime_like.util import private
from slime_like.util.private import create_private, open_lock, owned_by_another_user, private_folder, temporary_folder
from tests.cluster.run_folder import config


def test_a_ring_is_private_to_its_owner(tmp_path: Path) -> None:
    folder = tmp_path / "rings"
    ring = Ring(folder, "a_rank0", 8)
    assert [path.stat().st_mode & 0o777 for path in (folder, folder / "a_rank0.ring")] == [0o700, 0o600]
    ring.close()


def test_a_link_or_open_folder_is_refused_for_rings(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(victim)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o770)
    for name in ("link", "open"):
        with pytest.raises(SlimeLikeError, match="is not a private folder of this user"):
            Ring(tmp_path / name, "a_rank0", 8)
    assert list(victim.iterdir()) == []


def test_a_folder_of_another_user_is_neither_used_nor_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / f"{PREFIX}theirs"
    code = "import sys, pathlib; from slime_like.distributed.forensics.ring import Ring; Ring(pathlib.Path(sys.argv[1]), 'a_rank0', 8)"
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(SlimeLikeError, match="is not a private folder of this user"):
        private_folder(folder)
    assert sweep(tmp_path) == []
    monkeypatch.undo()
    assert sweep(tmp_path) == [folder]


def test_an_existing_file_is_replaced_without_following_a_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("theirs")
    (tmp_path / "file").symlink_to(victim)
    with create_private(tmp_path / "file") as file:
        file.write(b"ours")
    assert victim.read_text() == "theirs" and not (tmp_path / "file").is_symlink()


def test_the_name_of_a_ring_folder_is_not_predictable(tmp_path: Path) -> None:
    code = "import sys; from slime_like.cluster.plan.guard import ring_folder; print(ring_folder(sys.argv[1]))"
    other_process = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    ).stdout
    assert other_process.strip() != str(ring_folder(str(tmp_path))) == str(ring_folder(str(tmp_path)))


@pytest.mark.parametrize("kind", ["link", "hard link", "pipe"])
def test_a_lock_must_be_a_regular_file(tmp_path: Path, kind: str) -> None:
    victim, run_dir = tmp_path / "victim", tmp_path / "run"
    victim.write_text("theirs")
    run_dir.mkdir()
    if kind == "link":
        (run_dir / ".lock").symlink_to(victim)
    elif kind == "hard link":
        (run_dir / ".lock").hardlink_to(victim)
    else:
        os.mkfifo(run_dir / ".lock")
    with (
        pytest.raises(ConfigError, match=r"run\.dir=.* cannot be written \(.*\.lock"),
        claim_folder(config(run_dir), run_dir),
    ):
        pass
    with pytest.raises(OSError) as error:
        open_lock(run_dir / ".lock")
    assert error.value.filename == str(run_dir / ".lock"), "the command line reports only errors that name a file"
    assert victim.read_text() == "theirs"


def test_a_lock_is_private_to_its_user(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("of an earlier version")
    open_lock(tmp_path / "lock").close()
    assert (tmp_path / "lock").stat().st_mode & 0o777 == 0o600


def test_a_folder_of_another_user_is_refused_as_run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    run_dir = shared / "theirs" / "run"
    run_dir.mkdir(parents=True)
    monkeypatch.setattr(private.os, "geteuid", lambda: os.getuid() + 1)
    if os.getuid() == 0:
        os.chown(run_dir.parent, 12345, -1)
    assert owned_by_another_user(run_dir) is None
    for mode in (0o777, 0o1777):
        shared.chmod(mode)
        assert owned_by_another_user(run_dir) == run_dir.parent
    with (
        pytest.raises(ConfigError, match=r"run\.dir=.*/theirs belongs to another user"),
        claim_folder(config(run_dir), run_dir),
    ):
        pass


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a link to another user")
def test_a_link_of_another_user_is_refused_as_run_dir(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o1777)
    (tmp_path / "mine").mkdir()
    link = tmp_path / "shared" / "run"
    link.symlink_to(tmp_path / "mine")
    os.chown(link, 12345, -1, follow_symlinks=False)
    with pytest.raises(ConfigError, match=r"/run belongs to another user"), claim_folder(config(link), link.resolve()):
        pass
    assert not list((tmp_path / "mine").iterdir())


def test_a_temporary_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = temporary_folder("kernels", str(tmp_path))
    assert folder == temporary_folder("kernels", str(tmp_path))
    assert [path.stat().st_mode & 0o777 for path in (folder, folder.parent)] == [0o700] * 2
    monkeypatch.setattr(private.os, "geteuid", lambda: os.getuid() + 1)
    (tmp_path / f"slime_like-{os.getuid() + 1}").mkdir()
    with pytest.raises(SlimeLikeError, match="is not a private folder of this user"):
        temporary_folder("kernels", str(tmp_path))
