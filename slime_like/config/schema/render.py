"""Rendering of values in the grammar of Hydra's overrides."""

from __future__ import annotations

import re
from typing import Any, cast


def render(value: Any) -> str:
    """Return ``value`` in Hydra's override grammar. Strings are quoted, so that ``"1"`` or ``"true"`` stays a string.

    Keys of dicts are not quoted.
    """
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)
        case list():
            return f"[{','.join(render(item) for item in cast('list[Any]', value))}]"
        case dict():
            items = cast("dict[str, Any]", value).items()
            return f"{{{','.join(f'{name}: {render(item)}' for name, item in items)}}}"
        case _:
            # Hydra reads backslashes literally except before a quote, where each must be doubled.
            return "'" + re.sub(r"(\\*)('|\Z)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), str(value)) + "'"
