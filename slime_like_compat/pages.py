"""Generated tables of docs/coming_from_slime.md, docs/coming_from_verl.md and docs/defaults_verl.md.

A page has ``<!-- table: NAME -->`` before and ``<!-- end -->`` after each table; the rest is written by hand.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from slime_like.config.schema.base import default_of
from slime_like.config.schema.known import format_value, known_keys
from slime_like_compat.flags.defaults import DEFAULTS
from slime_like_compat.flags.table import ALWAYS, COMBINED, LISTS, REFUSED, SWITCHES, VALUES
from slime_like_compat.flags.without_key import HARMLESS, MODEL_SHAPE
from slime_like_compat.names_elsewhere import SLIME_METRICS, VERL_METRICS
from slime_like_compat.verl.defaults import DIFFERENT
from slime_like_compat.verl.features import NOT_HERE
from slime_like_compat.verl.without_effect import WITHOUT_EFFECT
from slime_like_compat.verl_keys import VERL_KEYS

PAGES = ("coming_from_slime.md", "coming_from_verl.md", "defaults_verl.md")
_PLACE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(page: str) -> str:
    """Return ``page`` with its tables regenerated. Raises ``KeyError`` for the name of an unknown table."""
    return _PLACE.sub(lambda match: match[1] + "\n".join(TABLES[match[2]]()) + "\n" + match[3], page)


def _table(*columns: str) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield "|" + "---|" * len(columns)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _mapped() -> Iterator[str]:
    yield from _table("flag", "key")
    for flag, (key, _) in (VALUES | LISTS).items():
        yield _row(f"`{flag}`", f"`{key}`")
    for flag, (key, value) in SWITCHES.items():
        yield _row(f"`{flag}`", f"`{key}={format_value(value)}`")
    for flag, keys in COMBINED.items():
        yield _row(f"`{flag}`", ", ".join(f"`{key}`" for key in keys))
    yield _row(
        "`--sglang-NAME`",
        "`rollout.sglang.NAME`: any field of SGLang's ServerArgs that neither another key nor slime_like itself sets",
    )
    yield _row(
        "`--NAME`",
        "`model.megatron.NAME`: any field of Megatron's TransformerConfig that neither another key nor `config.json` nor slime_like itself sets",
    )


def _always() -> Iterator[str]:
    yield from _table("flag", "reason")
    for flag, (required_value, reason) in ALWAYS.items():
        yield _row(f"`{flag}`" if required_value is None else f"`{flag} {required_value}`", reason)


def _refused() -> Iterator[str]:
    yield from _table("flag", "reason or alternative", "a script with this flag")
    for flag, reason in REFUSED.items():
        if flag not in MODEL_SHAPE:
            yield _row(f"`{flag}`", reason or "not supported", "is converted" if flag in HARMLESS else "is refused")


def _defaults() -> Iterator[str]:
    keys = known_keys()
    yield from _table("flag", "slime's default", "default here", "`from_slime.py` writes")
    for item in DEFAULTS:
        written_key = f"`{item.key}={item.override}`" if item.override is not None else "nothing"
        yield _row(
            f"`{item.flag}`",
            item.value,
            item.note or f"`{item.key}={format_value(default_of(keys[item.key]))}`",
            written_key,
        )


def _slime_metrics() -> Iterator[str]:
    yield from _table("slime", "here")
    for their_name, our_name in SLIME_METRICS.items():
        yield _row(f"`{their_name}`", f"`{our_name}`")


def _verl_keys() -> Iterator[str]:
    yield from _table("verl", "here", "note")
    for their_name, (our_name, note) in VERL_KEYS.items():
        yield _row(f"`{their_name}`", f"`{our_name}`", note)


def _verl_without() -> Iterator[str]:
    yield from _table("verl", "reason")
    for their_name, reason in WITHOUT_EFFECT.items():
        yield _row(f"`{their_name}`", reason)


def _verl_refused() -> Iterator[str]:
    yield from _table("verl", "accepted values", "reason or alternative")
    for their_name, item in NOT_HERE.items():
        yield _row(
            f"`{their_name}`",
            ", ".join(f"`{format_value(value) or repr('')}`" for value in item.off) or "none",
            item.instead,
        )


def _verl_defaults() -> Iterator[str]:
    yield from _table("verl", "verl's default", "here", "our default", "note")
    for item in DIFFERENT:
        their_name = format_value(item.value) if item.value != "" else ""
        yield _row(
            f"`{item.key}`",
            their_name and f"`{their_name}`",
            f"`{item.our_key}`",
            f"`{format_value(item.our_value)}`",
            item.note,
        )


def _verl_metrics() -> Iterator[str]:
    yield from _table("verl", "here")
    for their_name, our_name in VERL_METRICS.items():
        yield _row(f"`{their_name}`", f"`{our_name}`")


TABLES: dict[str, Callable[[], Iterator[str]]] = {
    "mapped": _mapped,
    "always": _always,
    "refused": _refused,
    "defaults": _defaults,
    "slime_metrics": _slime_metrics,
    "verl_keys": _verl_keys,
    "verl_without": _verl_without,
    "verl_refused": _verl_refused,
    "verl_defaults": _verl_defaults,
    "verl_metrics": _verl_metrics,
}
