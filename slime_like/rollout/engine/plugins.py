"""Entry points by which SGLang finds the plugins of an engine. SGLang skips a missing entry point without an error."""

from __future__ import annotations

import functools
import importlib.metadata
import sys

from slime_like.errors import ConfigError

PLUGINS_GROUP = "sglang.srt.plugins"
ENTRY_POINTS = {
    "sglang.srt.platforms": ("slime_like_cpu",),
    PLUGINS_GROUP: (
        "slime_like_cpu",
        "slime_like_dcp",
        "slime_like_flow_mla",
        "slime_like_kv_capacity",
        "slime_like_rollout_sampling",
        "slime_like_weight_commit",
    ),
}
"""Map from a group to the names of its entry points, as in setup.py."""
OPTIONAL_ENTRY_POINTS = ("slime_like_remote_experts",)
"""Entry points of ``PLUGINS_GROUP`` that only some engines need. An engine that needs one stops if it is not registered."""
WHITELIST = "SGLANG_PLUGINS"  # comma-separated entry points that SGLang may load; empty or unset: all


def missing_entry_points(group: str) -> list[str]:
    """Return the entry points of ``group`` that this installation does not register."""
    registered = _entry_points().select(group=group).names
    return [name for name in ENTRY_POINTS[group] if name not in registered]


@functools.cache  # reads the metadata of every installed distribution; they do not change while this process runs
def _entry_points() -> importlib.metadata.EntryPoints:
    return importlib.metadata.entry_points()


def check_entry_points() -> None:
    """Raise ``ConfigError`` if this installation does not register all of ``ENTRY_POINTS``; the error names the missing ones."""
    missing = [f"{group}: {name}" for group in ENTRY_POINTS for name in missing_entry_points(group)]
    if missing:
        raise ConfigError(
            f"the environment of {sys.executable} does not register the entry points {', '.join(missing)}: it was set up "
            "before these plugins existed, and SGLang would start engines without them; run `bash scripts/setup.sh`"
        )


def extended_whitelist(whitelist: str) -> str:
    """Return the user's ``SGLANG_PLUGINS`` with this project's entry points added; empty if ``whitelist`` is empty."""
    names = [name for name in map(str.strip, whitelist.split(",")) if name]
    return ",".join(dict.fromkeys([*names, *ENTRY_POINTS[PLUGINS_GROUP], *OPTIONAL_ENTRY_POINTS])) if names else ""
