"""slime's arguments -> overrides, with a report row for each. The flags are ``flags.table``'s."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from slime_like.config.load.loader import load_config, unchecked_config
from slime_like.config.schema.render import render
from slime_like.config.schema.root import TrainConfig
from slime_like.errors import ConfigError
from slime_like_compat.conversion_rows import BLOCKING, Mapped, Row
from slime_like_compat.flags.defaults import DEFAULTS, NEEDED, SlimeDefault
from slime_like_compat.flags.translate import translate
from slime_like_compat.shell.values import Value
from slime_like_compat.slime.given import Flags, Given, grouped
from slime_like_compat.slime.rows import keys_of, row_of
from slime_like_compat.slime.weights import starts_elsewhere

ENVIRONMENT = {"OPEN_TRAINING_INT4_FAKE_QAT_FLAG": "quantisation-aware training is not here"}
"""Variables of a job's environment that are part of what it does."""
WITHOUT_VALUE = ("--save-debug-rollout-data",)  # their path is run.dir here


def map_arguments(
    arguments: Sequence[Value],
    *,
    run_name: str,
    asynchronous: bool,
    drop: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Mapped:
    """Translate the arguments of slime's ``train.py`` (``train_async.py`` with ``asynchronous``).

    ``drop`` are flags to leave out, ``environment`` the variables that the job is started with. A row of ``rows.BLOCKING``
    leaves ``config`` None. Raises ``ConfigError``, naming the place in the script, for a word that belongs to no flag,
    and for a job that no configuration of ours describes.
    """
    items = grouped(arguments)
    flags = Flags.of([item for item in items if item.flag not in drop])
    kept_flags, rows = _sorted(items, flags, drop)
    rows += [
        Row(name, value, "", "refused", note=ENVIRONMENT[name])
        for name, value in (environment or {}).items()
        if name in ENVIRONMENT and value not in ("", "0") and name not in drop
    ]
    rows += [
        Row(flag, "", "", "refused", note=note)
        for flag, note in NEEDED.items()
        if flag not in flags and flag not in drop
    ]
    start_overrides = [f"run.name={render(run_name)}", "placement.device=cuda"]
    for key, row in _started(flags, asynchronous):
        start_overrides += [key] if key else []
        rows.append(row)
    if any(row.verdict in BLOCKING for row in rows):
        return Mapped(tuple(rows), (), None)
    overrides = [*start_overrides, *_translated(kept_flags, flags)]
    defaults = list(_defaults(flags, unchecked_config(overrides)))
    overrides += [f"{default.key}={default.override}" for default in defaults if default.override is not None]
    rows += [
        Row(d.flag, d.value, "", "default", (d.key,), d.note or "slime's default is written into the recipe")
        for d in defaults
    ]
    return Mapped(tuple(rows), tuple(overrides), _load(overrides, kept_flags))


def _started(flags: Flags, asynchronous: bool) -> Iterator[tuple[str, Row]]:
    """Yield the overrides that follow from how slime is started, not from a flag."""
    yield "", Row("train.py", "", "", "mapped", ("placement.device",), "slime runs on GPUs")
    if asynchronous and not flags.supervised:
        note = "one rollout ahead of the trainer"
        yield "loop.max_staleness=1", Row("train_async.py", "", "", "mapped", ("loop.max_staleness",), note)
    elif asynchronous:
        yield "", Row("train_async.py", "", "", "always", (), "algo=sft has no rollout to wait for")
    if (text := flags.text("--actor-num-nodes", "1")).isdecimal() and int(text) > 1:
        note = "joins the cluster that ray start made"
        yield "placement.ray_address=auto", Row("ray job submit", "", "", "mapped", ("placement.ray_address",), note)


def _translated(kept_flags: Sequence[Given], flags: Flags) -> list[str]:
    """Return the overrides of the flags that a recipe can say, with slime's defaults of the flags that they are read with."""
    implied = [
        text
        for flag, value in (("--actor-num-gpus-per-node", "8"), ("--n-samples-per-prompt", "1"))
        if flag not in flags
        for text in (flag, value)
    ]
    argv = [text for item in kept_flags for text in ([item.flag] if item.flag in WITHOUT_VALUE else item.argv)]
    overrides = [
        text for text in translate([*implied, *argv]).overrides if text.partition("=")[0] not in _keys_of(implied[::2])
    ]
    if (start := starts_elsewhere(flags)) is not None:
        has_reference = flags.has_kl and not flags.supervised
        overrides = [text for text in overrides if has_reference or not text.startswith("model.ref_checkpoint=")]
        if not any(text.startswith("model.megatron_checkpoint=") for text in overrides):
            overrides.append(f"model.megatron_checkpoint={render(start)}")
    return overrides


def _keys_of(flags: Sequence[str]) -> set[str]:
    return {key for flag in flags for key in keys_of(flag)}


def _load(overrides: list[str], kept_flags: Sequence[Given]) -> TrainConfig:
    try:
        return load_config(overrides, files=False, machine=False, code=False)
    except ConfigError as error:
        keys = re.findall(r"[a-z]+(?:\.\w+)+", str(error))
        about = [item for item in kept_flags if set(keys_of(item.flag)) & set(keys)]
        places = "".join(f"\n  {item.file_line}: {item.flag} {item.text}" for item in about)
        raise ConfigError(f"{error}\nThe script says so here, and --drop FLAG leaves a flag out:{places}") from error


def _sorted(items: Sequence[Given], flags: Flags, drop: Sequence[str]) -> tuple[list[Given], list[Row]]:
    """Return the flags that a recipe can say, and a row for every flag."""
    if absent := sorted(set(drop) - {item.flag for item in items} - {*NEEDED, *ENVIRONMENT}):
        raise ConfigError(f"--drop {absent[0]}: the script does not give it")
    kept_flags: list[Given] = []
    rows: list[Row] = []
    for item in items:
        if item.flag in drop:
            row = Row(item.flag, item.text, item.file_line, "dropped", note="by --drop")
        elif flags.last[item.flag] is not item:
            place = flags.last[item.flag].file_line
            row = Row(item.flag, item.text, item.file_line, "dropped", note=f"given again at {place}")
        else:
            row = row_of(item, flags)
        rows.append(row)
        kept_flags += [item] if row.verdict in ("mapped", "code") else []
    return kept_flags, rows


def _defaults(flags: Flags, cfg: TrainConfig) -> Iterator[SlimeDefault]:
    """Yield the defaults of slime that count in this run and differ from ours."""
    for default in DEFAULTS:
        if default.flag in flags or (default.needs and not any(flag in flags for flag in default.needs)):
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
        yield replace(default, override=render(_value(default.override, cfg)))


def _value(override: str, cfg: TrainConfig) -> Any:
    """Return the value of the right side of an override of ``DEFAULTS`` in the run."""
    if override.startswith("${"):
        group, _, name = override[2:-1].partition(".")
        return getattr(getattr(cfg, group), name)
    if override in ("null", "true", "false"):
        return {"null": None, "true": True, "false": False}[override]
    try:
        return float(override) if "." in override else int(override)
    except ValueError:
        return override.strip("'")


def _equal(value: object, default: object) -> bool:
    return value == default and isinstance(value, bool) == isinstance(default, bool)
