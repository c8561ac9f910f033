"""Caches of compiled code: protected from other users, and usable without a writable home."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slime_like.errors import SlimeLikeError
from slime_like.util import c_build, caches
from slime_like.util.caches import cache_folder, is_replaceable, keep_caches_private

NO_HOME = ("/proc", "/proc/nowhere")  # not even root can create a file there


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Redirect the machine's folder for temporary files, unset the variables of caches, return this user's folder."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    folder.chmod(0o1777)
    monkeypatch.setattr(caches, "FALLBACK", str(folder))
    monkeypatch.setattr(os, "environ", os.environ.copy())
    for name in ("XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "HF_HOME"):
        monkeypatch.delenv(name, raising=False)
    return folder / f"slime_like-{os.geteuid()}"


@pytest.mark.parametrize("home", NO_HOME)
def test_without_a_writable_home_kernels_are_cached_among_temporary_files(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, home: str
) -> None:
    monkeypatch.setenv("HOME", home)
    assert c_build.cache_folder() == temporary / "cpu_kernels"
    assert [path.stat().st_mode & 0o777 for path in (temporary, temporary / "cpu_kernels")] == [0o700] * 2
    monkeypatch.setenv("XDG_CACHE_HOME", home)
    assert c_build.cache_folder() == temporary / "cpu_kernels"


def test_a_cache_below_a_folder_writable_by_others_is_not_used(
    temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    (home / ".cache").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    assert cache_folder("kernels") == home / ".cache" / "slime_like" / "kernels"
    for part in (home, home / ".cache"):
        for mode, elsewhere in ((0o777, True), (0o770, True), (0o1777, False), (0o755, False)):
            part.chmod(mode)
            assert (cache_folder("kernels") == temporary / "kernels") is elsewhere, f"{part.name} {mode:o}"
        part.chmod(0o700)


def test_a_cache_below_a_folder_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    assert not is_replaceable(tmp_path / "link" / "not" / "there")
    if os.getuid() == 0:
        (tmp_path / "theirs").mkdir()
        os.chown(tmp_path / "theirs", 12345, -1)
        assert is_replaceable(tmp_path / "link" / "theirs" / "not" / "there")


def test_a_cache_through_a_link_that_others_can_replace_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir(mode=0o700)
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "link").symlink_to(tmp_path / "mine")
    assert not is_replaceable(tmp_path / "shared" / "link")
    (tmp_path / "to_link").symlink_to(Path("shared") / "link")
    assert not is_replaceable(tmp_path / "to_link" / "not" / "there")
    (tmp_path / "shared").chmod(0o777)
    assert is_replaceable(tmp_path / "to_link" / "not" / "there")
    assert is_replaceable(tmp_path / "shared" / "link")
    assert is_replaceable(tmp_path / "shared" / "link" / "not" / "there")


def test_a_planted_folder_among_temporary_files_is_refused(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/proc")
    temporary.mkdir()
    temporary.chmod(0o777)
    with pytest.raises(SlimeLikeError, match=r"slime_like-\d+ is not a private folder of this user"):
        keep_caches_private()
    with pytest.raises(c_build.BuildError, match=r"is not a private folder of this user.*set XDG_CACHE_HOME"):
        c_build.cache_folder()


def test_libraries_compile_into_folders_of_this_user(
    temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    keep_caches_private()
    inductor = tmp_path / ".cache" / "slime_like" / "inductor"
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(inductor) and inductor.stat().st_mode & 0o777 == 0o700
    assert os.environ["HOME"] == str(tmp_path) and "HF_HOME" not in os.environ
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "mine")
    for home in NO_HOME:
        monkeypatch.setenv("HOME", home)
        monkeypatch.delenv("HF_HOME", raising=False)
        keep_caches_private()
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "mine"
        assert os.environ["HOME"] == str(temporary / "home")
        assert os.environ["HF_HOME"] == f"{home}/.cache/huggingface", "downloads stay where they are"
