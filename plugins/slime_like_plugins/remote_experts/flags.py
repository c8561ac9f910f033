"""Command-line flags of remote experts, such as ``--remote-experts-count 64``, for a server that slime_like does not start."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import MISSING, fields
from typing import Any

from slime_like.config.schema.remote_experts import VARIABLE, RemoteExpertsConfig, RemoteOptions
from slime_like.errors import ConfigError
from slime_like_plugins.sglang_hooks import PLUGINS_VARIABLE, Hook
from slime_like_plugins.sglang_hooks import install as install_hooks

PREFIX = "--remote-experts-"
KEYS = "rollout.remote_experts."


def add_flags(result: None, parser: argparse.ArgumentParser) -> None:
    """Hook after ``ServerArgs.add_cli_args``: add a flag for each key of ``rollout.remote_experts``."""
    group = parser.add_argument_group("remote experts")
    for item in fields(RemoteExpertsConfig):
        default: Any = item.default_factory() if item.default is MISSING else item.default  # pyright: ignore[reportCallIssue]
        kind: Any = str if default is None else type(default)
        extra: dict[str, Any] = {"type": kind}
        if kind is list:
            extra = {"nargs": "+", "type": str if item.name == "workers" else int}
        text = str(item.metadata["help"]).replace("%", "%%")
        choices = item.metadata["choices"] or None
        group.add_argument(flag_of(item.name), default=default, choices=choices, help=text, **extra)


def flag_of(name: str) -> str:
    """Return the flag of a key of ``rollout.remote_experts``."""
    return PREFIX + name.replace("_", "-")


def is_used(argv: Sequence[str]) -> bool:
    """Return True if the command line sets a flag of remote experts."""
    return any(argument.startswith(PREFIX) for argument in argv)


def in_settings_of_user(text: str) -> str:
    """Return ``text`` with keys of ``rollout.remote_experts`` replaced by flags if this server was started with such flags."""
    return _with_flags(text, KEYS) if is_used(sys.argv[1:]) else text


def _with_flags(text: str, prefix: str) -> str:
    """Return ``text`` with a flag in place of each occurrence of ``prefix`` and a key."""
    return re.sub(rf"{re.escape(prefix)}(\w+)", lambda key: flag_of(key[1]), text)


def enable(argv: Sequence[str], name: str) -> None:
    """Enable plugin ``name`` in this process and its children, with the settings in ``argv``.

    Raises ``SystemExit`` if a setting is not valid.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_flags(None, parser)
    arguments, _ = parser.parse_known_args(argv)
    names = [item.name for item in fields(RemoteOptions)]
    config = RemoteExpertsConfig(**{key: getattr(arguments, f"remote_experts_{key}") for key in names})
    try:
        config.check(PREFIX)
    except ConfigError as error:
        raise SystemExit(f"slime_like plugin {name!r}: {_with_flags(str(error), PREFIX)}") from error
    if not config.enabled:
        fix = f"{flag_of('count')} to at least 1, or {flag_of('experts')}"
        raise SystemExit(f"slime_like plugin {name!r}: no expert is remote: set {fix}, without abbreviating a flag")
    values: dict[str, Any] = {key: value for key in names if (value := getattr(config, key)) is not None}
    lists: dict[str, Any] = {key: tuple(value) for key, value in values.items() if isinstance(value, list)}
    options = RemoteOptions(**(values | lists))
    os.environ[VARIABLE] = options.to_json()
    os.environ[PLUGINS_VARIABLE] = ",".join(filter(None, (os.environ.get(PLUGINS_VARIABLE), name)))


def install(name: str) -> None:
    """Make SGLang's command line accept the flags of remote experts. Raises ``SystemExit`` if the hook does not take effect."""
    install_hooks(name, (Hook("sglang.srt.server_args.ServerArgs.add_cli_args", "after", add_flags),))
