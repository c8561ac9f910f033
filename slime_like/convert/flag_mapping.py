"""slime's arguments -> overrides, with a row for each that says what became of it. The flags are ``config.flag_table``'s."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slime_like.config import flags, foreign, names
from slime_like.config.flag_defaults import DEFAULTS, SlimeDefault
from slime_like.config.flag_table import ALWAYS, COMBINED, LISTS, REFUSED, SWITCHES, VALUES, dotted
from slime_like.config.flags import translate
from slime_like.config.load import load_config
from slime_like.config.policy import K3
from slime_like.config.reward_names import split_prefix
from slime_like.config.root import TrainConfig
from slime_like.convert.shell_values import Value
from slime_like.errors import ConfigError
from slime_like.registry import resolve

VERDICTS = {
    "mapped": "a key says the same",
    "always": "done here anyway, no key",
    "default": "not in the script, and the two projects differ in what that means",
    "dropped": "left out, with the reason",
    "unknown": "no flag of this project, of SGLang's ServerArgs or Megatron's TransformerConfig",
}
OFFLOADED = 0.5
CODE = ("--custom-rm-path", "--custom-generate-function-path", "--data-source-path")


@dataclass(frozen=True, slots=True)
class Row:
    """What became of one flag."""

    flag: str
    given: str  # its values as in the script
    where: str  # file:line, empty for a flag that is not in the script
    verdict: str  # of VERDICTS
    keys: tuple[str, ...] = ()
    note: str = ""

    def text(self, values: dict[str, Any]) -> str:
        """``key=value`` of each key that the recipe has."""
        own = [
            key
            for key in values
            if any(key == mine or key.startswith(f"{mine}.") for mine in self.keys if mine != "algo")
        ]
        return ", ".join(f"{key}={values[key]!r}" for key in [*(["algo"] if "algo" in self.keys else []), *own])


@dataclass(frozen=True, slots=True)
class Mapped:
    """A run of slime in our terms."""

    rows: tuple[Row, ...]
    overrides: tuple[str, ...]
    config: TrainConfig  # what they compose to


@dataclass(frozen=True, slots=True)
class _Given:
    flag: str
    values: tuple[Value, ...]
    where: str

    @property
    def text(self) -> str:
        return " ".join(value.text if not value.problem else "?" for value in self.values)

    @property
    def argv(self) -> list[str]:
        return [self.flag, *(value.text for value in self.values)]


def map_arguments(arguments: Sequence[Value], *, run_name: str, asynchronous: bool, drop: Sequence[str] = ()) -> Mapped:
    """Translate the arguments of slime's ``train.py`` (``train_async.py`` with ``asynchronous``).

    ``drop`` are flags to leave out. Raises ``ConfigError``, naming the place in the script, for a value that could not be
    read or a word that belongs to no flag, and for a run that no configuration of ours describes.
    """
    given = _grouped(arguments)
    kept, rows = _sorted(given, drop)
    overrides = [f"run.name={flags.render(run_name)}", "placement.device=cuda"]
    rows.append(Row("train.py", "", "", "mapped", ("placement.device",), "slime runs on GPUs"))
    if asynchronous:
        overrides.append("loop.max_staleness=1")
        rows.append(
            Row("train_async.py", "", "", "mapped", ("loop.max_staleness",), "one rollout ahead of the trainer")
        )
    if _nodes(given) > 1:
        overrides.append("placement.ray_address=auto")
        rows.append(
            Row("ray job submit", "", "", "mapped", ("placement.ray_address",), "joins the cluster that ray start made")
        )
    translated = translate([text for item in kept for text in item.argv]).overrides
    overrides += translated
    present = {item.flag for item in given}
    defaults = list(_defaults(present, _load([*overrides], kept)))
    overrides += [f"{default.key}={default.override}" for default in defaults if default.override is not None]
    rows += [
        Row(d.flag, d.value, "", "default", (d.key,), d.note or "slime's default is written into the recipe")
        for d in defaults
    ]
    return Mapped(tuple(rows), tuple(overrides), _load(overrides, kept))


def _nodes(given: Sequence[_Given]) -> int:
    text = next((item.text for item in given if item.flag == "--actor-num-nodes"), "1")
    return int(text) if text.isdigit() else 1


def _load(overrides: list[str], kept: Sequence[_Given]) -> TrainConfig:
    try:
        return load_config(overrides, files=False, machine=False)
    except ConfigError as error:
        keys = re.findall(r"[a-z]+(?:\.\w+)+", str(error))
        about = [item for item in kept if set(keys_of(item.flag)) & set(keys)]
        places = "".join(f"\n  {item.where}: {item.flag} {item.text}" for item in about)
        raise ConfigError(f"{error}\nThe script says so here, and --drop FLAG leaves a flag out:{places}") from error


def keys_of(flag: str) -> tuple[str, ...]:
    """The keys that a flag sets; empty where it sets none."""
    if flag in COMBINED:
        return COMBINED[flag]
    for table in (VALUES, LISTS, SWITCHES):
        if flag in table:
            return (table[flag][0],)
    return ()


def _grouped(arguments: Sequence[Value]) -> list[_Given]:
    """Flags with the values that follow them."""
    found: list[_Given] = []
    for value in arguments:
        flag, equals, text = value.text.partition("=")
        if value.text.startswith("--") and not value.problem:
            rest = (Value(text, value.where),) if equals else ()
            found.append(_Given(flag, rest, value.where))
        elif found:
            found[-1] = replace(found[-1], values=(*found[-1].values, value))
        else:
            raise ConfigError(f"{value.where}: {value.problem or repr(value.text)}: a flag was expected here")
    return found


def _sorted(given: Sequence[_Given], drop: Sequence[str]) -> tuple[list[_Given], list[Row]]:
    """The flags that a recipe can say, and a row for every flag."""
    if absent := sorted(set(drop) - {item.flag for item in given}):
        raise ConfigError(f"--drop {absent[0]}: the script does not give it")
    last = {item.flag: at for at, item in enumerate(given)}
    kept: list[_Given] = []
    rows: list[Row] = []
    for at, item in enumerate(given):
        if item.flag in drop:
            row = Row(item.flag, item.text, item.where, "dropped", note="by --drop")
        elif last[item.flag] != at:
            row = Row(
                item.flag, item.text, item.where, "dropped", note=f"given again at {given[last[item.flag]].where}"
            )
        else:
            row = _row(item, given)
        rows.append(row)
        kept += [item] if row.verdict in ("mapped", "always") else []
    return kept, rows


def _row(item: _Given, given: Sequence[_Given]) -> Row:
    row = Row(item.flag, item.text, item.where, "mapped", keys_of(item.flag))
    problem = next((value.problem for value in item.values if value.problem), "")
    if item.flag in REFUSED or (problem and not _is_known(item.flag)):
        missing = "there is no such feature here" if item.flag in REFUSED else ""
        reason = REFUSED.get(item.flag) or missing or _refusal(item, ["1"])
        verdict = "dropped" if item.flag in REFUSED or "is unknown" not in reason else "unknown"
        return replace(row, verdict=verdict, keys=(), note=_reason(reason, item.flag))
    if problem:
        raise ConfigError(f"{item.where}: {item.flag} {problem}, or --drop {item.flag}")
    if why := _without_effect(item, given):
        return replace(row, verdict="dropped", keys=(), note=why)
    if reason := _refusal(item, [value.text for value in item.values]):
        verdict = "unknown" if "is unknown" in reason and item.flag not in VALUES else "dropped"
        return replace(row, verdict=verdict, keys=(), note=_reason(reason, item.flag))
    if item.flag in ALWAYS:
        return replace(row, verdict="always", note=ALWAYS[item.flag][1])
    if not row.keys:
        row = replace(row, keys=tuple(text.partition("=")[0] for text in translate(item.argv).overrides))
    return replace(row, note=_note(item, given))


def _reason(message: str, flag: str) -> str:
    """A refusal of ``train.py``, for a table whose row begins with the flag."""
    message = message.removeprefix(f"{flag} ").removeprefix("is unknown: ")
    if message.startswith("belongs to config.json"):
        return "config.json of --hf-checkpoint says it"
    for text in (": remove the flag, and set it there", ": remove the flag", "; remove the flag"):
        message = message.removesuffix(text)
    return message


def _is_known(flag: str) -> bool:
    """Whether a value of ``flag`` would come into the recipe."""
    if keys_of(flag) or flag in ALWAYS:
        return True
    return _refusal(_Given(flag, (), ""), ["1"]) == ""


def _refusal(item: _Given, values: list[str]) -> str:
    """Why ``train.py`` would not take the flag on its own; empty when it does, or when others have to be seen with it."""
    if item.flag in COMBINED:
        return ""
    try:
        overrides = translate([item.flag, *values]).overrides
    except ConfigError as error:
        return str(error)
    if stray := [value for value in item.values if value.text in overrides]:
        raise ConfigError(f"{stray[0].where}: {stray[0].text!r} belongs to no flag: {item.flag} takes fewer values")
    return ""


def _without_effect(item: _Given, given: Sequence[_Given]) -> str:
    """Why slime would ignore a flag beside the others that are given, or what a name of it is not here."""
    present = {other.flag: other.text for other in given}
    if item.flag in ("--kl-loss-coef", "--kl-loss-type") and "--use-kl-loss" not in present:
        return "has no effect without --use-kl-loss, in slime as well"
    if item.flag == "--kl-loss-type" and item.text not in K3 and not _positive(present, "--kl-loss-coef"):
        return "has no effect without --kl-loss-coef above 0, in slime as well"
    if item.flag == "--ref-load" and not _has_kl(present):
        return "no KL to a reference is asked for; the policy starts from --hf-checkpoint, which holds the same weights"
    if item.flag in ("--tis-clip", "--tis-clip-low") and "--use-tis" not in present:
        return "has no effect without --use-tis, in slime as well"
    if item.flag == "--optimizer-offload-fraction" and "--optimizer-cpu-offload" not in present:
        return "has no effect without --optimizer-cpu-offload, in Megatron as well"
    if item.flag == "--rm-type" and split_prefix(item.text)[1] not in names.REWARDS:
        return f"there is no reward of this name (there are {', '.join(names.REWARDS)}): reward.name stays as it is"
    if item.flag in CODE and ":" in (path := dotted(item.flag, item.text)):
        return _missing_code(path)
    if item.flag == "--advantage-estimator" and item.text not in flags.ESTIMATORS:
        return f"one of {', '.join(flags.ESTIMATORS)}"
    return ""


def _missing_code(path: str) -> str:
    try:
        resolve("", path, {})
    except ConfigError:
        return "cannot be imported here: put it on PYTHONPATH, with the signature that docs/coming_from_slime.md names"
    return ""


def _has_kl(present: dict[str, str]) -> bool:
    return ("--use-kl-loss" in present and _positive(present, "--kl-loss-coef")) or _positive(present, "--kl-coef")


def _positive(present: dict[str, str], flag: str) -> bool:
    try:
        return float(present.get(flag, "0")) > 0
    except ValueError:
        return True


def _note(item: _Given, given: Sequence[_Given]) -> str:
    present = {other.flag for other in given}
    if item.flag == "--sglang-mem-fraction-static" and "--colocate" in present and float(item.text) > OFFLOADED:
        return "slime moves the trainer out while engines sample; here both stay on the GPUs: lower it to what train.py --plan leaves"
    if item.flag.startswith("--sglang-") and item.flag not in VALUES:
        return f"a field of {foreign.source(foreign.SGLANG)}"
    return ""


def _defaults(present: set[str], cfg: TrainConfig) -> Iterator[SlimeDefault]:
    """The defaults of slime that count in this run and are not ours."""
    for default in DEFAULTS:
        if default.flag in present or (default.needs is not None and default.needs not in present):
            continue
        if default.override is None:
            yield default
            continue
        group, _, name = default.key.partition(".")
        owner = getattr(cfg, group)
        if not hasattr(owner, name) or _equal(getattr(owner, name), _value(default.override, cfg)):
            continue
        if default.key == "algo.aggregation" and cfg.algo.name in ("dr_grpo", "gspo"):
            continue
        if default.key == "algo.kl_loss_type" and getattr(cfg.algo, "kl_loss_coef", 0) == 0:
            continue
        yield replace(default, override=flags.render(_value(default.override, cfg)))


def _value(override: str, cfg: TrainConfig) -> Any:
    """What the right side of an override of ``DEFAULTS`` is in the run."""
    if override.startswith("${"):
        group, _, name = override[2:-1].partition(".")
        return getattr(getattr(cfg, group), name)
    if override in ("null", "true", "false"):
        return {"null": None, "true": True, "false": False}[override]
    try:
        return float(override) if "." in override else int(override)
    except ValueError:
        return override.strip("'")


def _equal(ours: object, theirs: object) -> bool:
    return ours == theirs and isinstance(ours, bool) == isinstance(theirs, bool)
