"""Text of ``train.py --help``: actions, recipes, groups with their keys, flags."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path

from slime_like.config.load.compat import ACTIONS, ALWAYS, COMBINED, LISTS, SWITCHES, VALUES
from slime_like.config.load.paths import config_folder
from slime_like.config.schema.base import MISSING, default_of
from slime_like.config.schema.known import ALGORITHMS, format_value, known_keys, type_of
from slime_like.errors import ConfigError
from slime_like.registry import nearest

WIDTH = 118


def render_help(topic: str | None = None) -> str:
    """Return the full help, or the keys of one group. Raises ``ConfigError`` on an unknown group."""
    groups = dict.fromkeys(key.partition(".")[0] for key in known_keys())
    if topic is not None and topic not in groups:
        raise ConfigError(f"--help {topic}: no such group: {nearest(topic, groups)}")
    lines = _group(topic) if topic is not None else _all(list(groups))
    return "\n".join(lines) + "\n"


def _all(groups: list[str]) -> Iterator[str]:
    yield "python train.py [+recipe=NAME] [key=value ...] ['~key' ...] [--flag value ...]"
    yield ""
    yield "  python train.py +recipe=quickstart              a complete run that needs only this checkout"
    yield "  python train.py +recipe=quickstart optim.lr=0   the same run with another value"
    yield "  python train.py +recipe=quickstart '~optim.lr'  the same run with the key's default, not the recipe's value"
    yield "  python train.py +recipe=quickstart --plan       print the plan of the run without starting it"
    yield ""
    for flag, text in ACTIONS.items():
        yield from _entry(flag, text)
    yield ""
    yield "Recipes (configs/recipe)"
    for path in sorted((config_folder() / "recipe").glob("*.yaml")):
        yield from _entry(f"+recipe={path.stem}", _description(path))
    for group in groups:
        yield ""
        yield from _group(group)
    yield ""
    yield "Flags of slime and Megatron, and the keys they set"
    yield from _flags()


def _group(group: str) -> Iterator[str]:
    yield (
        f"{group}.*"
        if group != "algo"
        else "algo.*  (choose with algo=<name>, grpo by default; each algorithm has its own keys: see docs/algorithms.md)"
    )
    for key, item in known_keys().items():
        if key.partition(".")[0] != group:
            continue
        default = default_of(item)
        default_text = "required" if default == MISSING else format_value(default)
        owners_note = _owners(key, default_text) if group == "algo" else ""
        choices = item.metadata.get("choices", ())
        kind = " | ".join(choices) if choices else type_of(item)
        help_text = str(item.metadata.get("help", ""))
        yield from _entry(key, f"{help_text} ({kind}; {default_text}){owners_note}")


def _owners(key: str, default_text: str) -> str:
    """Return a note on ``key``: the algorithms that have it, unless all do, and their defaults that are not ``default_text``.

    The defaults are left out for algo.name, which each algorithm sets to its own name.
    """
    owners = [name for name in ALGORITHMS if key in known_keys(name)]
    other_algorithms = [name for name in ALGORITHMS if name not in owners]
    short = ", ".join(owners) if len(owners) <= len(other_algorithms) else f"all but {', '.join(other_algorithms)}"
    suffix = f" [{short}]" if other_algorithms else ""
    defaults = {name: format_value(default_of(known_keys(name)[key])) for name in owners}
    owner_defaults = [f"{name}: {value}" for name, value in defaults.items() if value != default_text]
    return suffix + (f" [{', '.join(owner_defaults)}]" if owner_defaults and key != "algo.name" else "")


def _flags() -> Iterator[str]:
    for flag, (key, _) in (VALUES | LISTS).items():
        yield from _entry(f"{flag} ...", key)
    for flag, (key, value) in SWITCHES.items():
        yield from _entry(flag, f"{key}={format_value(value)}")
    for flag, targets in COMBINED.items():
        yield from _entry(flag, ", ".join(targets))
    for flag, (argument, reason) in ALWAYS.items():
        yield from _entry(flag if argument is None else f"{flag} {argument}", f"no key: {reason}")
    yield from _entry("--sglang-NAME ...", "rollout.sglang.NAME: any field of SGLang's ServerArgs")
    yield from _entry("--NAME ...", "model.megatron.NAME: any field of Megatron's TransformerConfig")


def _entry(name: str, text: str) -> Iterator[str]:
    body = textwrap.wrap(text, WIDTH - 42) or [""]
    if len(name) > 38:
        yield f"  {name}"
    else:
        yield f"  {name:<38}  {body.pop(0)}"
    for line in body:
        yield f"{'':<42}{line}"


def _description(path: Path) -> str:
    """Return a recipe's description: its comments, without Hydra's directives, up to the first line that ends with a period."""
    lines: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("# ") and not line.startswith("# @"):
            lines.append(line[2:])
            if line.endswith("."):
                break
    return " ".join(lines)
