"""Translation of a command line into an action and Hydra overrides; ``table`` maps flags to keys."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from slime_like.config.rules import foreign
from slime_like.config.schema.render import render
from slime_like.config.schema.root import TrainConfig
from slime_like.errors import ConfigError
from slime_like.registry import closest
from slime_like.util.reading import parse_strict_json
from slime_like_compat.flags.combined import NO_VALUE, SEVERAL_VALUES, combine
from slime_like_compat.flags.table import ALWAYS, COMBINED, LISTS, REFUSED, SWITCHES, VALUES, one_of
from slime_like_compat.flags.without_key import SGLANG_RENAMED

ACTIONS = {
    "--plan": "print the placement, the batch sizes and the value chosen for each key set to auto, and exit",
    "--plan-for": "--plan-for 8xH200: print the plan for a machine with that many GPUs, without checking this machine",
    "--trace": "with --plan or --plan-for: also run a step of the trainer on a phantom GPU and print its memory, without a GPU",
    "--doctor": "check this machine and environment, print fixes for missing parts, and exit",
    "--help": "print this help, or the keys of one group (--help rollout), and exit",
    "--cfg": "--cfg job: print the composed configuration as YAML and exit",
    "--config-dir": "an additional folder of recipes",
}
_GROUPS = "|".join(["recipe", *(item.name for item in fields(TrainConfig))])
_OVERRIDE = re.compile(rf"\+*({_GROUPS})(\.[\w.-]+)?=|~({_GROUPS})(\.[\w.-]+)?(=|$)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Command:
    """Parsed command line: the action, and the overrides that describe the run."""

    action: str  # train | plan | doctor | help | show
    overrides: tuple[str, ...]
    topic: str | None = None  # group for --help
    config_dir: str | None = None
    machine: str | None = None  # machine for --plan-for
    trace: bool = False  # also trace the planned trainer


def translate(argv: Sequence[str]) -> Command:
    """Parse ``argv``. Flags are translated to overrides, except those of ``ACTIONS``; other words are taken as overrides.

    Example: ``["--lr", "1e-6", "run.name=a"]`` gives overrides ``("optim.lr=1e-06", "run.name=a")``.
    Raises ``ConfigError`` if a flag is unknown (naming the nearest) or not supported, if its value is missing, wrong or
    superfluous, if flags cannot be combined, or if ``--trace`` is given without a plan.
    """
    tokens = _Tokens(list(argv))
    overrides: list[str] = []
    sources: dict[str, list[str]] = {}
    action, topic, config_dir, machine, trace = "train", None, None, None, False
    for token in tokens:
        if not token.startswith("-"):
            overrides.append(token)
        elif token in ("--help", "-h"):
            action, topic = "help", tokens.optional_value()
        elif token in ("--plan", "--doctor"):
            action = token[2:]
        elif token == "--plan-for":
            action, machine = "plan", tokens.value(token)
        elif token == "--trace":
            trace = True
        elif token == "--cfg":
            one_of("job")(token, tokens.value(token))
            action = "show"
        elif token == "--config-dir":
            config_dir = tokens.value(token)
        elif token in COMBINED:
            sources[token] = _combined_values(token, tokens)
        else:
            overrides += _simple_overrides(token, tokens)
        if token in VALUES or token in SWITCHES:
            sources[token] = [tokens.current_token]
    if trace and action != "plan":
        raise ConfigError("--trace needs a plan: add --plan, or --plan-for 8xH100 to describe the GPUs")
    # Overrides of combined flags come first, so that an explicit key wins.
    return Command(action, (*combine(sources), *overrides), topic, config_dir, machine, trace)


def flag_of(key: str) -> str | None:
    """Return the first flag of ``table`` that sets ``key``; None if there is none."""
    simple = [flag for table in (VALUES, LISTS, SWITCHES) for flag, (target, _) in table.items() if target == key]
    return next(iter([*simple, *(flag for flag, targets in COMBINED.items() if key in targets)]), None)


def known_flags() -> list[str]:
    """Return the flags of ``ACTIONS`` and of the tables of accepted flags.

    ``translate`` also accepts the fields of SGLang's ServerArgs (``--sglang-NAME``) and Megatron's TransformerConfig.
    """
    return [*ACTIONS, *VALUES, *LISTS, *SWITCHES, *COMBINED, *ALWAYS]


class _Tokens:
    """Tokens of a command line, with ``--flag=value`` split in two. Iterating consumes them.

    Iterating raises ``ConfigError`` at a value that was given as ``--flag=value`` to a flag that takes none.
    """

    def __init__(self, argv: list[str]) -> None:
        self._remaining: list[str] = []
        self.current_token = ""
        for text in argv:
            flag, equals, value = text.partition("=")
            self._remaining += [flag, f"\0{value}"] if text.startswith("--") and equals else [text]

    def __iter__(self) -> Iterator[str]:
        while self._remaining:
            token = self._remaining.pop(0)
            if token.startswith("\0"):
                raise ConfigError(f"{self.current_token} takes no value, but got {token[1:]!r}")
            self.current_token = token
            yield token

    def optional_value(self) -> str | None:
        """Consume and return the next token if it is a value, else return None."""
        if not self._remaining or self._remaining[0].startswith("--"):
            return None
        if not self._remaining[0].startswith("\0") and _OVERRIDE.match(self._remaining[0]):
            return None
        self.current_token = self._remaining.pop(0).removeprefix("\0")
        return self.current_token

    def value(self, flag: str) -> str:
        """Consume and return the value of ``flag``. Raises ``ConfigError`` if it is missing."""
        text = self.optional_value()
        if text is None:
            raise ConfigError(f"{flag} needs a value: {flag} VALUE or {flag}=VALUE")
        return text

    def values(self, flag: str) -> list[str]:
        """Consume and return one or more values of ``flag``. Raises ``ConfigError`` if there is none."""
        texts = [self.value(flag)]
        while (text := self.optional_value()) is not None:
            texts.append(text)
        return texts


def _simple_overrides(flag: str, tokens: _Tokens) -> list[str]:
    """Return the overrides of a flag that does not depend on other flags.

    Raises ``ConfigError`` if the flag is unknown or not supported, or if its value is missing, wrong or not supported.
    """
    if flag in VALUES:
        key, convert = VALUES[flag]
        return [f"{key}={render(convert(flag, tokens.value(flag)))}"]
    if flag in LISTS:
        key, convert = LISTS[flag]
        return [f"{key}={render([convert(flag, text) for text in tokens.values(flag)])}"]
    if flag in SWITCHES:
        key, value = SWITCHES[flag]
        if flag == "--save-debug-rollout-data" and (path := tokens.optional_value()) is not None:
            raise ConfigError(f"{flag} {path}: rollouts are written to run.dir/rollouts; give the flag without a path")
        return [f"{key}={render(value)}"]
    if flag in ALWAYS:
        required_value, reason = ALWAYS[flag]
        if required_value is not None and (value_text := tokens.value(flag)) != required_value:
            raise ConfigError(f"{flag} {value_text} is not supported yet: {reason}; remove it or give {required_value}")
        return []
    if flag in REFUSED:
        raise ConfigError(f"{flag} is not supported yet: {REFUSED[flag] or 'remove it'}")
    if flag.startswith("--sglang-"):
        return [_foreign_override(flag, flag.removeprefix("--sglang-"), "rollout.sglang", tokens)]
    if flag.startswith("--") and flag[2:].replace("-", "_") in foreign.table(foreign.MEGATRON):
        return [_foreign_override(flag, flag[2:], "model.megatron", tokens)]
    raise ConfigError(f"{flag} is unknown: {nearest_flag(flag)}")


def nearest_flag(flag: str) -> str:
    """Return a hint for an unknown flag."""
    close = closest(flag, [*known_flags(), *REFUSED])
    return f"did you mean {close!r}?" if close else "python train.py --help lists flags and keys"


def _foreign_override(flag: str, name: str, root: str, tokens: _Tokens) -> str:
    """Return the override of ``flag``, which sets the field ``name`` of SGLang or Megatron; a boolean flag needs no value.

    ``root`` is the key of our mapping of such fields. Raises ``ConfigError`` if there is no such field, if this project sets
    the field itself, if the value is missing, or if the value of a boolean flag is neither true nor false.
    """
    table = foreign.table(foreign.ROOTS[root])
    aliases = {alias: key for key, entry in table.items() for alias in entry.get("flags", [])}
    key = aliases.get(f"--{name}", name.replace("-", "_"))
    key = SGLANG_RENAMED.get(key, key) if root == "rollout.sglang" else key
    if key not in table:
        close = closest(name, [field.replace("_", "-") for field in table])
        hint = f"did you mean '--sglang-{close}'?" if close else "no field has a similar name"
        raise ConfigError(f"{flag} is unknown: {foreign.source(foreign.ROOTS[root])} has no field {key}: {hint}")
    if key in foreign.OWNED[foreign.ROOTS[root]]:
        raise ConfigError(foreign.describe_owner(flag, foreign.OWNED[foreign.ROOTS[root]][key], "the flag"))
    annotation = table[key]["type"]
    if annotation in ("bool", "Optional[bool]"):
        return f"{root}.{key}={render(_parsed_bool(flag, tokens.optional_value()))}"
    texts = tokens.values(flag) if "List[" in annotation else [tokens.value(flag)]
    values = [_converted(annotation, text) for text in texts]
    single = "List[" not in annotation or (len(values) == 1 and foreign.accepts(annotation, values[0]))
    return f"{root}.{key}={render(values[0] if single else values)}"


def _parsed_bool(flag: str, text: str | None) -> bool:
    if text is None:
        return True
    return one_of("true", "false")(flag, text.lower()) == "true"


def _converted(annotation: str, text: str) -> Any:
    """Return ``text`` parsed as the first of int, float, JSON and str that fits the type ``annotation``.

    For a list type, a value that fits as an item of the list is accepted too. Return ``text`` itself if none fits.
    """
    for parse in (int, float, parse_strict_json, str):
        try:
            value: Any = parse(text)
        except ValueError:
            continue
        if foreign.accepts(annotation, value) or foreign.accepts(annotation, [value]):
            return value
    return text


def _combined_values(flag: str, tokens: _Tokens) -> list[str]:
    if flag in NO_VALUE:
        return []
    return tokens.values(flag) if flag in SEVERAL_VALUES else [tokens.value(flag)]
