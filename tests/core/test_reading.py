"""File reader: every kind of damage becomes one error that names file, field and fix."""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slime_like.errors import CheckpointError
from slime_like.util.reading import Count, InputFile, typed


@dataclass(frozen=True, slots=True)
class Entry:
    length: Count
    name: str = ""


def npz(**arrays: Any) -> bytes:
    archive_bytes = io.BytesIO()
    np.savez(archive_bytes, **arrays)
    return archive_bytes.getvalue()


def absurd_shape() -> bytes:
    """Return an .npz whose header claims an array of 8 TB."""
    member = io.BytesIO()
    np.lib.format.write_array_header_1_0(member, {"descr": "<f8", "fortran_order": False, "shape": (10**12,)})
    archive_bytes = io.BytesIO()
    with zipfile.ZipFile(archive_bytes, "w") as archive:
        archive.writestr("a.npy", member.getvalue())
    return archive_bytes.getvalue()


CONTENTS: dict[str, tuple[bytes, Callable[[InputFile], object], str]] = {
    "text": (b"\xff", InputFile.text, "as UTF-8 text"),
    "JSON, bytes": (b'{"a": "\xff"}', InputFile.json, "as UTF-8 text"),
    "JSON, torn": (b'{"a": ', InputFile.json, "as JSON"),
    "JSON, deep": (b"[" * 100_000, InputFile.json, "nested too deeply"),
    "JSON, long number": (b"9" * 5000, InputFile.json, "as JSON"),
    "JSON, no object": (b"[1]", InputFile.json_object, "contains [1] instead of a JSON object"),
    "YAML, torn": (b"a: [1", InputFile.yaml, "as YAML"),
    "YAML, deep": (b"[" * 100_000, InputFile.yaml, "as YAML"),
    "YAML, no such day": (b"a: 2026-99-99", InputFile.yaml, "as YAML"),
    "npz, none": (b"x", InputFile.arrays, "not a readable .npz file"),
    "npz, objects": (npz(a=np.array([{}], dtype=object)), InputFile.arrays, "not a readable .npz file"),
    "npz, absurd": (absurd_shape(), InputFile.arrays, "not a readable .npz file"),
    "npz, torn": (npz(a=np.zeros(9))[:-30], InputFile.arrays, "not a readable .npz file"),
}


@pytest.mark.parametrize("name", CONTENTS)
def test_content_that_cannot_be_read_is_named(name: str, tmp_path: Path) -> None:
    content, reader, words = CONTENTS[name]
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as error:
        reader(InputFile(path, CheckpointError, "copy it", key="some.key"))
    text = str(error.value)
    assert text.startswith(f"some.key: {path} ") and words in text and text.endswith("; copy it")
    assert text.isprintable() and len(text) < 600


@pytest.mark.parametrize("kind", ["missing", "folder", "pipe", "link to itself", "NUL"])
@pytest.mark.parametrize("reader", [InputFile.data, InputFile.json, InputFile.yaml, InputFile.arrays])
def test_a_path_that_is_not_a_regular_file_is_named(
    kind: str, reader: Callable[[InputFile], object], tmp_path: Path
) -> None:
    path = tmp_path / ("a\0b" if kind == "NUL" else "file")
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "link to itself":
        path.symlink_to(path)
    with pytest.raises(CheckpointError, match="; copy it"):
        reader(InputFile(path, CheckpointError, "copy it"))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "missing required field `length`"),
        ({"length": True}, "length: Expected `int`, got `bool`"),
        ({"length": -1}, "length: Expected `int` >= 0"),
        ({"length": 10**30}, "length: Expected `int` <="),
        ({"length": 1, "nmae": "x"}, "unknown field 'nmae'"),
        ({"length": 1, "": "x"}, "unknown field ''"),
        ([], "Expected `object`, got `array`"),
    ],
)
def test_a_field_of_a_wrong_type_is_named(values: object, words: str) -> None:
    with pytest.raises(ValueError, match="(?i)" + words.replace("(", "\\(")):
        typed(values, Entry)
