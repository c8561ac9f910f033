"""Rendering of values in the grammar of Hydra's overrides."""

from __future__ import annotations

import re
from typing import Any, cast

from slime_like.errors import ConfigError

# Keys of the characters that Hydra reads in a key, some only if escaped.
KEY = re.compile(r"[A-Za-z0-9_/+.$%*@?|\\()\[\]{}:=, \t-]+")
# Keys that Hydra reads as a bool, null or a number.
TYPED_KEY = re.compile(r"(?i:true|false|null|[+-]?(?:inf|nan|(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:e[+-]?\d[\d_]*)?))")


def render(value: Any) -> str:
    """Return ``value`` in Hydra's override grammar. Strings are quoted, so that ``"1"`` or ``"true"`` stays a string.

    Raises ``ConfigError`` if a dict has a key that the grammar cannot represent, as it has no quoted keys.
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
            items = cast("dict[Any, Any]", value).items()
            return f"{{{','.join(f'{_render_key(name)}: {render(item)}' for name, item in items)}}}"
        case _:
            # Hydra reads backslashes literally except before a quote, where each must be doubled.
            return "'" + re.sub(r"(\\*)('|\Z)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), str(value)) + "'"


def _render_key(key: Any) -> str:
    if not isinstance(key, str):
        return render(key)
    if not KEY.fullmatch(key) or TYPED_KEY.fullmatch(key):
        raise ConfigError(
            f"a mapping has the key {key!r}, which cannot be written in an override: rename the key, or write the mapping into a "
            "recipe"
        )
    return re.sub(r"[\\()\[\]{}:=, \t]", r"\\\g<0>", key)
