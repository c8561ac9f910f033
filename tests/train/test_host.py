"""Import hook of megatron-core: it adapts the modules of ``megatron.core``, and no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slime_like.train.megatron.platform import host


def test_a_package_whose_name_only_begins_with_megatron_core_is_left_alone(tmp_path: Path) -> None:
    finder: Any = host._Finder("cuda")
    for name in ("core", "core_x"):
        (tmp_path / f"{name}.py").touch()
    assert finder.find_spec("megatron.core", [str(tmp_path)]) is not None
    assert finder.find_spec("megatron.core_x", [str(tmp_path)]) is None
    (tmp_path / "utils.py").touch()
    assert finder.find_spec("megatron.core.utils", [str(tmp_path)]) is not None
    assert finder.find_spec("megatron.core_x.utils", [str(tmp_path)]) is None
