"""Random damage to files, as done by disks, editors, interrupted copies and careless scripts."""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import yaml

Change = Callable[[bytes, Random], bytes]
WRONG_VALUES: tuple[Any, ...] = (
    *(None, True, "", "x", "\ud800", "\x00", [], {}, [None], {"x": 1}),
    *(-1, 0, 1, 1.5, 2**31, 2**63, 10**30, 1e308, float("nan"), float("inf"), -(10**12)),
    *("9" * 5000, "../../x", [[0]], ["x"] * 3, {"": {"": []}}),
)
ENTRIES = ("folder", "missing", "dangling link", "link to itself", "pipe", "unreadable")


def _at(data: bytes, rng: Random) -> int:
    return rng.randrange(len(data) + 1)


def _flipped(data: bytes, rng: Random) -> bytes:
    out = bytearray(data or b"\0")
    for _ in range(rng.choice((1, 1, 3, 20))):
        out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


def _inserted(content: bytes) -> Change:
    def change(data: bytes, rng: Random) -> bytes:
        offset = _at(data, rng)
        return data[:offset] + content + data[offset:]

    return change


def _zeroed(data: bytes, rng: Random) -> bytes:
    start = _at(data, rng)
    stop = min(len(data), start + rng.choice((1, 16, 4096)))
    return data[:start] + bytes(stop - start) + data[stop:]


def _cut_out(data: bytes, rng: Random) -> bytes:
    start = _at(data, rng)
    return data[:start] + data[start + rng.choice((1, 7, 100)) :]


def _doubled(data: bytes, rng: Random) -> bytes:
    start = _at(data, rng)
    return data[:start] + data[start : start + rng.choice((1, 30, 500))] + data[start:]


BYTES: dict[str, Change] = {
    "truncated": lambda data, rng: data[: rng.randrange(max(1, len(data)))],
    "last byte lost": lambda data, rng: data[:-1],
    "empty": lambda data, rng: b"",
    "flipped bits": _flipped,
    "not UTF-8": _inserted(b"\xff\xfe\xc0"),
    "NUL bytes": _inserted(b"\0" * 16),
    "zeroed block": _zeroed,
    "bytes lost": _cut_out,
    "bytes doubled": _doubled,
    "garbage": lambda data, rng: rng.randbytes(rng.randrange(1, 300)),
    "garbage behind": lambda data, rng: data + rng.randbytes(20),
    "nested deeply": lambda data, rng: b"[" * 100_000,
    "nested objects": lambda data, rng: b'{"a":' * 50_000,
    "UTF-16": lambda data, rng: data.decode(errors="replace").encode("utf-16"),
    "byte order mark": lambda data, rng: b"\xef\xbb\xbf" + data,
    "null": lambda data, rng: b"null",
    "list": lambda data, rng: b"[1, 2]\n",
    "number": lambda data, rng: b"9" * 5000,
    "text": lambda data, rng: b"404: Not Found\n",
    "page of a proxy": lambda data, rng: b"<!DOCTYPE html><html>\n<body>sign in</body></html>\n",
    "pointer of git-lfs": lambda data, rng: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
}


def of_bytes(path: Path, rng: Random) -> str:
    """Change the bytes of ``path``; return the name of the damage."""
    name = rng.choice(list(BYTES))
    path.write_bytes(BYTES[name](path.read_bytes(), rng))
    return name


def of_entry(path: Path, rng: Random) -> str:
    """Replace ``path`` by another kind of entry, or remove its permissions; return the name of the damage."""
    name = rng.choice(ENTRIES)
    if name == "unreadable":
        path.chmod(0)
        return name
    path.unlink()
    if name == "folder":
        path.mkdir()
    elif name == "dangling link":
        path.symlink_to(path.with_name("nowhere"))
    elif name == "link to itself":
        path.symlink_to(path.name)
    elif name == "pipe":
        os.mkfifo(path)
    return name


def of_fields(path: Path, rng: Random) -> str:
    """Change one field of a file with JSON, YAML, JSON lines, arrays or tensors, which stays well-formed."""
    kind = "".join(path.suffixes[-1:])
    if kind == ".npz":
        return _arrays(path, rng)
    if kind == ".safetensors":
        return _tensors(path, rng)
    if kind == ".parquet":
        return _table(path, rng)
    text = path.read_text()
    if kind == ".jsonl":
        lines = text.splitlines()
        index = rng.randrange(len(lines))
        lines[index], change = _json(lines[index], rng)
        path.write_text("\n".join(lines) + "\n", errors="surrogatepass")
        return f"line {index + 1}, {change}"
    if kind == ".yaml":
        tree = yaml.safe_load(text)
        change = change_tree(tree, rng)
        path.write_text(yaml.safe_dump(tree), errors="surrogatepass")
        return change
    text, change = _json(text, rng)
    path.write_text(text, errors="surrogatepass")
    return change


def change_tree(tree: Any, rng: Random) -> str:
    """Change one entry of ``tree``: remove, rename or replace it; return a description."""
    places = list(_places(tree))
    if not places:
        return "nothing"
    holder, name = rng.choice(places)
    label = repr(name)[:40]
    change = rng.choice(("gone", "renamed", *["wrong"] * 5, "nudged"))
    if change == "gone":
        del holder[name]
    elif change == "renamed" and isinstance(holder, dict):
        holder[f"{name}_"] = holder.pop(name)
    elif change == "nudged" and isinstance(holder[name], (int, float)):
        holder[name] = holder[name] + rng.choice((1, -1, 1000))
    else:
        holder[name] = rng.choice(WRONG_VALUES)
        change = repr(holder[name])[:30]
    return f"{label}: {change}"


def _places(tree: Any) -> Any:
    items: Any = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for name, value in items:
        yield tree, name
        yield from _places(value)


def _json(text: str, rng: Random) -> tuple[str, str]:
    tree = [json.loads(text)]
    change = change_tree(tree[0], rng)
    return json.dumps(tree[0]), change


def _arrays(path: Path, rng: Random) -> str:
    with np.load(path) as archive:
        arrays = {name: archive[name] for name in archive}
    name = rng.choice([*arrays, "header", "header", "header"])
    if name == "header" and "header" in arrays:
        text, change = _json(str(arrays["header"]), rng)
        arrays["header"] = np.array(text.replace("\\u0000", "\\u0001"))
    else:
        name = name if name in arrays else next(iter(arrays))
        array = arrays.pop(name)
        changes: dict[str, Any] = {
            "gone": None,
            "shorter": array.reshape(-1)[:-1],
            "longer": np.concatenate([array.reshape(-1), array.reshape(-1)]),
            "another dtype": array.astype(np.str_),
            "as float64": array.astype(np.float64) if array.dtype.kind in "if" else None,
            "another shape": array.reshape(1, -1),
            "objects": np.array([{"a": 1}, None], dtype=object),
            "negative": -np.abs(array.reshape(-1)) - 1 if array.dtype.kind in "if" else None,
        }
        change = rng.choice(list(changes))
        if changes[change] is not None:
            arrays[name] = changes[change]
        change = f"{name}: {change}"
    archive_bytes = io.BytesIO()
    np.savez_compressed(archive_bytes, **arrays)
    path.write_bytes(archive_bytes.getvalue())
    return change


def _tensors(path: Path, rng: Random) -> str:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    text, change = _json(data[8 : 8 + length].decode(), rng)
    header = text.encode(errors="surrogatepass")
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])
    return change


def _table(path: Path, rng: Random) -> str:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    name = rng.choice(list(rows[0]))
    value = rng.choice((None, "", 1.5, b"\xff", [], [{"role": "user"}], True))
    for row in rows:
        row[name] = value
    pq.write_table(pa.Table.from_pylist(rows), path)
    return f"{name}: {value!r}"


def restore(path: Path, pristine: Path) -> None:
    """Replace ``path``, a file or folder, by ``pristine``."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif path.is_symlink() or path.exists():
        path.unlink()
    if pristine.is_dir():
        shutil.copytree(pristine, path)
    else:
        shutil.copy(pristine, path)
