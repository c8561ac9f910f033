"""argv -> what to do, and Hydra overrides. slime's and Megatron's flags become keys by ``flag_table``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

from slime_like.checkpoint_files import MANIFEST, megatron_folder
from slime_like.config import foreign
from slime_like.config.flag_table import (
    ALWAYS,
    COMBINED,
    ESTIMATORS,
    LISTS,
    REFUSED,
    SWITCHES,
    VALUES,
    number,
    one_of,
    whole,
)
from slime_like.config.flags_without_key import SGLANG_RENAMED
from slime_like.config.names import GROUP_ADVANTAGES
from slime_like.config.root import TrainConfig
from slime_like.errors import ConfigError
from slime_like.registry import nearest

ACTIONS = {
    "--plan": "print placement, batch identity and what each auto resolves to, and exit",
    "--plan-for": "--plan-for 8xH200: the plan on another machine with so many GPUs; what this one lacks is not asked",
    "--doctor": "check this machine and environment, name the fix for what is missing, and exit",
    "--help": "print this help, or that of one group (--help rollout), and exit",
    "--cfg": "--cfg job: print the composed configuration as YAML and exit",
    "--config-dir": "a folder of your own recipes, beside configs/",
}
_GROUPS = "|".join(["recipe", *(item.name for item in fields(TrainConfig))])
_OVERRIDE = re.compile(rf"[+~]*({_GROUPS})(\.[\w.-]+)?=", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Command:
    """A command line: what to do, and the overrides that describe the run."""

    action: str  # train | plan | doctor | help | show
    overrides: tuple[str, ...]
    topic: str | None = None  # the group that --help asks for
    config_dir: str | None = None
    machine: str | None = None  # that --plan-for asks about


def translate(argv: Sequence[str]) -> Command:
    """Read ``argv``: flags become overrides, everything else is an override as it stands.

    Example: ``["--lr", "1e-6", "run.name=a"]`` gives overrides ``("optim.lr=1e-06", "run.name=a")``.
    Raises ``ConfigError`` on a flag that is unknown (naming the nearest), not supported or without its value.
    """
    tokens = _Tokens(list(argv))
    overrides: list[str] = []
    combined: dict[str, list[str]] = {}
    action, topic, config_dir, machine = "train", None, None, None
    for token in tokens:
        if not token.startswith("-"):
            overrides.append(token)
        elif token in ("--help", "-h"):
            action, topic = "help", tokens.word()
        elif token in ("--plan", "--doctor"):
            action = token[2:]
        elif token == "--plan-for":
            action, machine = "plan", tokens.value(token)
        elif token == "--cfg":
            one_of("job")(token, tokens.value(token))
            action = "show"
        elif token == "--config-dir":
            config_dir = tokens.value(token)
        elif token in COMBINED:
            combined[token] = _combined_values(token, tokens)
        else:
            overrides += _simple(token, tokens)
        if token in VALUES or token in SWITCHES:
            combined[token] = [tokens.last]
    # What several flags say together comes first, so that a key given outright wins.
    return Command(action, (*_combine(combined), *overrides), topic, config_dir, machine)


def flag_of(key: str) -> str | None:
    """The flag that sets ``key``, if there is one."""
    simple = [flag for table in (VALUES, LISTS, SWITCHES) for flag, (target, _) in table.items() if target == key]
    return next(iter([*simple, *(flag for flag, targets in COMBINED.items() if key in targets)]), None)


def known_flags() -> list[str]:
    """Every flag that is accepted by name; ``--sglang-*`` and Megatron's TransformerConfig fields come on top."""
    return [*ACTIONS, *VALUES, *LISTS, *SWITCHES, *COMBINED, *ALWAYS]


def render(value: Any) -> str:
    """``value`` in Hydra's override grammar. A number or truth value in quotes stays text."""
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
            # Hydra reads backslashes as themselves except before a quote, where they come in pairs.
            return "'" + re.sub(r"(\\*)('|\Z)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), str(value)) + "'"


class _Tokens:
    """The command line, with ``--flag=value`` split in two."""

    def __init__(self, argv: list[str]) -> None:
        self._left: list[str] = []
        self.last = ""
        for text in argv:
            flag, equals, value = text.partition("=")
            self._left += [flag, f"\0{value}"] if text.startswith("--") and equals else [text]

    def __iter__(self) -> Iterator[str]:
        while self._left:
            token = self._left.pop(0)
            if token.startswith("\0"):
                raise ConfigError(f"{self.last} takes no value, but got {token[1:]!r}")
            self.last = token
            yield token

    def word(self) -> str | None:
        """The next token, if it is a value."""
        if not self._left or self._left[0].startswith("--"):
            return None
        if not self._left[0].startswith("\0") and _OVERRIDE.match(self._left[0]):
            return None
        self.last = self._left.pop(0).removeprefix("\0")
        return self.last

    def value(self, flag: str) -> str:
        """The value of ``flag``."""
        found = self.word()
        if found is None:
            raise ConfigError(f"{flag} needs a value: {flag} VALUE or {flag}=VALUE")
        return found

    def values(self, flag: str) -> list[str]:
        """One or more values of ``flag``."""
        found = [self.value(flag)]
        while (more := self.word()) is not None:
            found.append(more)
        return found


def _simple(flag: str, tokens: _Tokens) -> list[str]:
    """Overrides of a flag that needs no other flag to be understood."""
    if flag in VALUES:
        key, convert = VALUES[flag]
        return [f"{key}={render(convert(flag, tokens.value(flag)))}"]
    if flag in LISTS:
        key, convert = LISTS[flag]
        return [f"{key}={render([convert(flag, text) for text in tokens.values(flag)])}"]
    if flag in SWITCHES:
        key, value = SWITCHES[flag]
        if flag == "--save-debug-rollout-data" and (path := tokens.word()) is not None:
            raise ConfigError(f"{flag} {path}: rollouts are written to run.dir/rollouts; give the flag without a path")
        return [f"{key}={render(value)}"]
    if flag in ALWAYS:
        only, reason = ALWAYS[flag]
        if only is not None and (given := tokens.value(flag)) != only:
            raise ConfigError(f"{flag} {given} is not supported yet: {reason}; remove it or give {only}")
        return []
    if flag in REFUSED:
        raise ConfigError(f"{flag} is not supported yet: {REFUSED[flag] or 'remove it'}")
    if flag.startswith("--sglang-"):
        return [_foreign(flag, flag.removeprefix("--sglang-"), "rollout.sglang", tokens)]
    if flag.startswith("--") and flag[2:].replace("-", "_") in foreign.table(foreign.MEGATRON):
        return [_foreign(flag, flag[2:], "model.megatron", tokens)]
    raise ConfigError(f"{flag} is unknown: {nearest_flag(flag)}")


def nearest_flag(flag: str) -> str:
    """A hint for an unknown flag."""
    hint = nearest(flag, [*known_flags(), *REFUSED])
    return hint if hint.startswith("did you mean") else "python train.py --help lists flags and keys"


def _foreign(flag: str, name: str, root: str, tokens: _Tokens) -> str:
    """A flag of SGLang or Megatron as an override of a free mapping; a truth value needs no word after it."""
    table = foreign.table(foreign.ROOTS[root])
    aliases = {alias: key for key, entry in table.items() for alias in entry.get("flags", [])}
    key = aliases.get(f"--{name}", name.replace("-", "_"))
    key = SGLANG_RENAMED.get(key, key) if root == "rollout.sglang" else key
    if key not in table:
        hint = nearest(f"--sglang-{name}", [f"--sglang-{known.replace('_', '-')}" for known in table])
        hint = hint if hint.startswith("did you mean") else "no field has a similar name"
        raise ConfigError(f"{flag} is unknown: {foreign.source(foreign.ROOTS[root])} has no field {key}: {hint}")
    if key in foreign.OWNED[foreign.ROOTS[root]]:
        raise ConfigError(foreign.owned(flag, foreign.OWNED[foreign.ROOTS[root]][key], "the flag"))
    annotation = table[key]["type"]
    if annotation in ("bool", "Optional[bool]"):
        return f"{root}.{key}={render(_truth(flag, tokens.word()))}"
    texts = tokens.values(flag) if "List[" in annotation else [tokens.value(flag)]
    values = [_fitting(annotation, text) for text in texts]
    single = "List[" not in annotation or (len(values) == 1 and foreign.accepts(annotation, values[0]))
    return f"{root}.{key}={render(values[0] if single else values)}"


def _truth(flag: str, text: str | None) -> bool:
    if text is None:
        return True
    return one_of("true", "false")(flag, text.lower()) == "true"


def _fitting(annotation: str, text: str) -> Any:
    """``text`` as the first of int, float, JSON and str that ``annotation`` (or a list of it) accepts."""
    readings: list[Any] = []
    for read in (int, float, json.loads, str):
        try:
            readings.append(read(text))
        except ValueError:
            continue
    fits = (r for r in readings if foreign.accepts(annotation, r) or foreign.accepts(annotation, [r]))
    return next(fits, text)


def _combined_values(flag: str, tokens: _Tokens) -> list[str]:
    if flag in ("--use-kl-loss", "--use-opd"):
        return []
    return tokens.values(flag) if flag == "--eval-prompt-data" else [tokens.value(flag)]


def _combine(seen: Mapping[str, list[str]]) -> Iterator[str]:
    """Overrides of the flags in ``COMBINED``."""
    if name := _one(seen, "--advantage-estimator"):
        if name not in ESTIMATORS:
            raise ConfigError(f"--advantage-estimator {name} is not supported yet: one of {', '.join(ESTIMATORS)}")
        if "--use-opd" not in seen:
            yield f"algo={ESTIMATORS[name]}"
    if "--use-opd" in seen:
        yield from _distillation(seen, ESTIMATORS[name or "grpo"])
    yield from _engines(seen)
    # slime replaces what its filter drops for as long as it takes.
    yield from (["rollout.max_refills=100"] if "--dynamic-sampling-filter-path" in seen else [])
    if (path := _one(seen, "--load")) is not None:
        yield _load(path, _one(seen, "--save"))
    if (text := _one(seen, "--kl-loss-coef")) is not None:
        if number("--kl-loss-coef", text) > 0 and "--use-kl-loss" not in seen:
            raise ConfigError(
                f"--kl-loss-coef {text} has no effect without --use-kl-loss: add it, or set algo.kl_loss_coef"
            )
        yield f"algo.kl_loss_coef={render(number('--kl-loss-coef', text))}"
    # slime's scripts give --kl-coef 0 to algorithms that have no such key.
    if (text := _one(seen, "--kl-coef")) is not None and number("--kl-coef", text) != 0:
        yield f"algo.kl_coef={render(number('--kl-coef', text))}"
    if (path := _one(seen, "--load-debug-rollout-data")) is not None:
        yield f"run.replay_from={render(path)}"
        yield "run.mode=train_only"
    if (text := _one(seen, "--apply-chat-template-kwargs")) is not None:
        yield from _chat_template_kwargs(text)
    if "--eval-prompt-data" in seen:
        yield from _eval_sets(seen["--eval-prompt-data"])


def _distillation(seen: Mapping[str, list[str]], estimator: str) -> Iterator[str]:
    """slime adds a teacher's judgement to the advantages of an estimator."""
    kind = _one(seen, "--opd-type")
    if kind != "megatron":
        raise ConfigError(f"--opd-type {kind}: the teacher runs on Megatron ranks; give --opd-type megatron")
    if estimator not in GROUP_ADVANTAGES:
        raise ConfigError(
            f"--use-opd with --advantage-estimator {estimator} is not supported yet: one of {', '.join(GROUP_ADVANTAGES)}"
        )
    yield "algo=distill"
    yield f"algo.group_advantage={estimator}"


def _load(path: str, save: str | None) -> str:
    """slime resumes by --load and --save naming one folder; run.resume=auto looks in run.dir.

    Weights without a trainer's state, as slime's converters write them, are where a run starts.
    """
    source = megatron_folder(Path(path))
    if source is not None and not (source / MANIFEST).is_file():
        return f"model.megatron_checkpoint={render(path)}"
    return f"run.resume={render('auto' if path == save else path)}"


def _one(seen: Mapping[str, list[str]], flag: str) -> str | None:
    return seen[flag][-1] if flag in seen else None


def _engines(seen: Mapping[str, list[str]]) -> Iterator[str]:
    """slime counts GPUs for rollout, we count engines; without --colocate these GPUs are the rollout's own."""
    per = whole("--rollout-num-gpus-per-engine", _one(seen, "--rollout-num-gpus-per-engine") or "1")
    gpus, nodes = _one(seen, "--rollout-num-gpus"), _one(seen, "--actor-num-nodes") or "1"
    if gpus is None and "--colocate" in seen and "--actor-num-gpus-per-node" in seen:
        per_node = whole("--actor-num-gpus-per-node", seen["--actor-num-gpus-per-node"][-1])
        gpus = str(per_node * whole("--actor-num-nodes", nodes))
    if gpus is None:
        return
    total = whole("--rollout-num-gpus", gpus)
    if total < 1 or per < 1 or total % per:
        raise ConfigError(
            f"{total} rollout GPUs do not make whole engines of --rollout-num-gpus-per-engine {per}: "
            f"give --rollout-num-gpus as a multiple of {per}"
        )
    yield f"rollout.num_engines={total // per}"
    if "--colocate" not in seen:
        yield "placement.mode='split'"


def _chat_template_kwargs(text: str) -> Iterator[str]:
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise ConfigError(
            f"--apply-chat-template-kwargs {text}: expected JSON such as '{{\"enable_thinking\": false}}'"
        )
    yield "data.chat_template_kwargs={}"
    for name, value in cast("dict[str, Any]", values).items():
        yield f"data.chat_template_kwargs.{name}={render(value)}"


def _eval_sets(words: list[str]) -> Iterator[str]:
    if len(words) % 2:
        raise ConfigError(
            f"--eval-prompt-data {' '.join(words)}: expected pairs of a name and a path, such as aime data/aime.jsonl"
        )
    yield "evaluation.datasets={}"
    for name, path in zip(words[::2], words[1::2], strict=True):
        if not re.fullmatch(r"[\w-]+", name):
            raise ConfigError(f"--eval-prompt-data {name} {path}: a name has letters, digits, - and _ only")
        yield f"evaluation.datasets.{name}={render(path)}"
