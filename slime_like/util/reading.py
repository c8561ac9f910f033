"""Reader of the input files of a run. A damaged file raises one error that names the file, the defect and the fix."""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import msgspec
import yaml

from slime_like.errors import DataError, SlimeLikeError

Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
MAX_MESSAGE = 300  # characters of a parser's message
# PyYAML's own errors, and errors that its constructors do not convert.
YAML_ERRORS = (yaml.YAMLError, ValueError, RecursionError, LookupError, TypeError, AttributeError)


@dataclass(frozen=True, slots=True)
class InputFile:
    """Input file, with the class of the errors that reading it raises and the fix that ends each error message.

    Example: ``InputFile(path, CheckpointError, "download it again", key="model.hf_checkpoint").json_object()``.
    """

    path: Path
    error: type[SlimeLikeError] = DataError
    fix: str = "copy it again"
    key: str = ""  # the config key that names the file or its folder

    def refused(self, problem: str) -> SlimeLikeError:
        """Return an error whose message has the config key, the path, ``problem`` (such as "is missing") and the fix."""
        start = f"{self.key}: {self.path}" if self.key else f"{self.path}"
        return self.error(f"{start} {one_line(problem)}; {self.fix}")

    def check_regular(self) -> None:
        """Raise ``self.error`` unless the path is an existing regular file; reading a pipe might never end."""
        try:
            mode = self.path.stat().st_mode
        except FileNotFoundError as error:
            raise self.refused("is missing") from error
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path
            raise self.refused(f"cannot be read ({reason(error)})") from error
        if not stat.S_ISREG(mode):
            raise self.refused("is a folder, not a file" if stat.S_ISDIR(mode) else "is not a regular file")

    def data(self) -> bytes:
        """Return the file's bytes. Raises ``self.error`` if they cannot be read."""
        self.check_regular()
        try:
            return self.path.read_bytes()
        except OSError as error:
            raise self.refused(f"cannot be read ({reason(error)})") from error

    def text(self) -> str:
        """Return the file as UTF-8 text. Raises ``self.error`` if it cannot be read or decoded."""
        try:
            return self.data().decode()
        except UnicodeDecodeError as error:
            raise self.refused(f"cannot be read as UTF-8 text ({reason(error)})") from error

    def json(self) -> Any:
        """Return the file's JSON value. Raises ``self.error`` if the file cannot be read or is not JSON."""
        text = self.text()
        try:
            return parse_json(text)
        except ValueError as error:
            raise self.refused(f"cannot be read as JSON ({error})") from error

    def json_object(self) -> dict[str, Any]:
        """Return the file's JSON object. Raises ``self.error`` if the file cannot be read or contains another value."""
        values = self.json()
        if not isinstance(values, dict):
            raise self.refused(f"contains {abbreviate(values)} instead of a JSON object")
        return cast("dict[str, Any]", values)

    def yaml(self) -> Any:
        """Return the file's YAML value. Raises ``self.error`` if the file cannot be read or is not YAML."""
        text = self.text()
        try:
            return yaml.safe_load(text)
        except YAML_ERRORS as error:
            raise self.refused(f"cannot be read as YAML ({reason(error)})") from error

    def arrays(self) -> dict[str, Any]:
        """Return the arrays of an ``.npz`` file by name.

        Raises ``self.error`` if the file cannot be read, is damaged or contains Python objects.
        """
        import numpy as np

        self.check_regular()
        try:
            with np.load(self.path, allow_pickle=False) as columns:
                return {name: columns[name] for name in columns}
        # The fault boundary of numpy's, zipfile's and zlib's readers, which raise a dozen kinds of errors on damage.
        except Exception as error:
            raise self.refused(f"is not a readable .npz file ({reason(error)})") from error

    def typed[T](self, values: object, kind: type[T]) -> T:
        """Convert ``values``, read from this file, to ``kind`` with the function ``typed``.

        Raises ``self.error`` if the values do not fit.
        """
        try:
            return typed(values, kind)
        except ValueError as error:
            raise self.refused(f"cannot be used: {error}") from error


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raises ``ValueError`` if it is invalid, nested too deeply or not UTF-8."""
    try:
        return json.loads(text.decode() if isinstance(text, bytes) else text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def parse_strict_json(text: str) -> Any:
    """Return the value of a JSON text. Raises ``ValueError`` as ``parse_json`` does, and on NaN and Infinity."""

    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is not valid JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def typed[T](values: object, kind: type[T]) -> T:
    """Return parsed JSON or YAML as a ``kind``: a dataclass or any other type that ``msgspec`` supports.

    Raises ``ValueError`` if a field is missing, out of range or of the wrong type, if ``values`` has a field that a dataclass
    ``kind`` does not have, or if ``values`` is nested too deeply. Unknown fields of nested dataclasses are ignored.
    """
    if is_dataclass(kind) and isinstance(values, Mapping):
        field_names = {item.name for item in fields(kind)}
        mapping = cast("Mapping[object, object]", values)
        if unknown := [name for name in mapping if name not in field_names]:
            raise ValueError(f"unknown field {abbreviate(unknown[0])}")
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        problem, _, location = str(error).partition(" - at `$")
        raise ValueError(f"{location.rstrip('`').lstrip('.')}: {problem}" if location else problem) from error
    except (OverflowError, RecursionError) as error:
        raise ValueError(reason(error)) from error


def one_line(text: str) -> str:
    """Return ``text`` on one printable line, truncated to ``MAX_MESSAGE`` characters."""
    line = "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))
    return line if len(line) <= MAX_MESSAGE else line[: MAX_MESSAGE - 3] + "..."


def abbreviate(value: object) -> str:
    """Format a value for a message, truncated to 60 characters."""
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."


def reason(error: BaseException) -> str:
    """Return a parser's or the system's description of an error, on one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return one_line(str(error)) or type(error).__name__
