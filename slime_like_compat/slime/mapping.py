"""Translation of slime's arguments to overrides, with a report row for each argument; ``flags.table`` has the flags."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from slime_like.config.load.loader import unchecked_config
from slime_like.config.schema.render import render
from slime_like.config.schema.root import TrainConfig
from slime_like.errors import ConfigError
from slime_like_compat.conversion import compose
from slime_like_compat.conversion_rows import BLOCKING, Mapped, Row, same_value
from slime_like_compat.flags.defaults import DEFAULTS, NEEDED, SlimeDefault
from slime_like_compat.flags.translate import translate
from slime_like_compat.shell.values import Value
from slime_like_compat.slime.occurrences import FlagOccurrence, Flags, group_by_flag
from slime_like_compat.slime.rows import keys_of, row_of
from slime_like_compat.slime.weights import start_checkpoint

ENVIRONMENT = {"OPEN_TRAINING_INT4_FAKE_QAT_FLAG": "there is no quantisation-aware training"}
"""Environment variables that change the job, with the reason to refuse each."""
FLAGS_WITHOUT_PATH = ("--save-debug-rollout-data",)  # the folder is run.dir instead of slime's path


def map_arguments(
    arguments: Sequence[Value],
    *,
    run_name: str,
    asynchronous: bool,
    drop: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Mapped:
    """Translate the arguments of slime's ``train.py`` or, with ``asynchronous``, of ``train_async.py``.

    ``drop`` are flags, or variables of ``ENVIRONMENT``, to leave out; ``environment`` has the variables that the job is
    started with. The returned ``config`` is None if a row has a verdict of ``BLOCKING``. Functions that the flags name are
    imported to check their signatures. Raises ``ConfigError`` if settings conflict or do not compose to a configuration, if a
    name in ``drop`` is unknown (see ``_kept_flags``), or if a value belongs to no flag.
    """
    items = group_by_flag(arguments)
    flags = Flags.of([item for item in items if item.flag not in drop])
    kept_flags, rows = _kept_flags(items, flags, drop)
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
    for key, row in _start_overrides(flags, asynchronous):
        start_overrides += [key] if key else []
        rows.append(row)
    if any(row.verdict in BLOCKING for row in rows):
        return Mapped(tuple(rows), (), None)
    overrides = [*start_overrides, *_flag_overrides(kept_flags, flags)]
    defaults = list(_defaults(flags, unchecked_config(overrides)))
    overrides += [f"{item.key}={item.override}" for item in defaults if item.override is not None]
    rows += [
        Row(
            item.flag, item.value, "", "default", (item.key,), item.note or "slime's default is written into the recipe"
        )
        for item in defaults
    ]
    hint = "The script sets these keys here, and --drop FLAG leaves a flag out"
    config = compose(overrides, rows, hint, project="slime", sign=" ")
    return Mapped(tuple(rows), tuple(overrides), config)


def _start_overrides(flags: Flags, asynchronous: bool) -> Iterator[tuple[str, Row]]:
    """Yield an override (or an empty text) and a row for each choice that slime's start command implies."""
    yield "", Row("train.py", "", "", "mapped", ("placement.device",), "slime runs on GPUs")
    if asynchronous and not flags.is_supervised:
        note = "one rollout ahead of the trainer"
        yield "loop.max_staleness=1", Row("train_async.py", "", "", "mapped", ("loop.max_staleness",), note)
    elif asynchronous:
        yield "", Row("train_async.py", "", "", "always", (), "algo=sft has no rollout to wait for")
    if (text := flags.text("--actor-num-nodes", "1")).isdecimal() and int(text) > 1:
        note = "joins the cluster that ray start has started"
        yield "placement.ray_address=auto", Row("ray job submit", "", "", "mapped", ("placement.ray_address",), note)


def _flag_overrides(kept_flags: Sequence[FlagOccurrence], flags: Flags) -> list[str]:
    """Return the overrides of ``kept_flags``, which a recipe can express.

    If ``--actor-num-gpus-per-node`` or ``--n-samples-per-prompt`` is omitted, other flags are translated with its default in
    slime, but that default gives no override of its own. If the policy starts from ``--ref-load``, the value of that flag sets
    model.megatron_checkpoint unless another flag does, and sets model.ref_checkpoint only if the job uses a reference model.
    """
    default_flags = [
        text
        for flag, value in (("--actor-num-gpus-per-node", "8"), ("--n-samples-per-prompt", "1"))
        if flag not in flags
        for text in (flag, value)
    ]
    argv = [text for item in kept_flags for text in ([item.flag] if item.flag in FLAGS_WITHOUT_PATH else item.argv)]
    overrides = [
        text
        for text in translate([*default_flags, *argv]).overrides
        if text.partition("=")[0] not in _keys_of(default_flags[::2])
    ]
    if (start := start_checkpoint(flags)) is not None:
        has_reference = flags.has_kl and not flags.is_supervised
        overrides = [text for text in overrides if has_reference or not text.startswith("model.ref_checkpoint=")]
        if not any(text.startswith("model.megatron_checkpoint=") for text in overrides):
            overrides.append(f"model.megatron_checkpoint={render(start)}")
    return overrides


def _keys_of(flags: Sequence[str]) -> set[str]:
    return {key for flag in flags for key in keys_of(flag)}


def _kept_flags(
    items: Sequence[FlagOccurrence], flags: Flags, drop: Sequence[str]
) -> tuple[list[FlagOccurrence], list[Row]]:
    """Return the flags that a recipe can express, and a row for every one of ``items``.

    Raises ``ConfigError`` if a name in ``drop`` is not a flag of the script and is in neither ``NEEDED`` nor ``ENVIRONMENT``,
    and the error of ``row_of``.
    """
    if unknown_flags := sorted(set(drop) - {item.flag for item in items} - {*NEEDED, *ENVIRONMENT}):
        raise ConfigError(f"--drop {unknown_flags[0]}: the script does not give it: remove this --drop")
    kept_flags: list[FlagOccurrence] = []
    rows: list[Row] = []
    for item in items:
        if item.flag in drop:
            row = Row(item.flag, item.text, item.file_line, "dropped", note="by --drop")
        elif flags.by_name[item.flag] is not item:
            place = flags.by_name[item.flag].file_line
            row = Row(item.flag, item.text, item.file_line, "dropped", note=f"given again at {place}")
        else:
            row = row_of(item, flags)
        rows.append(row)
        kept_flags += [item] if row.verdict in ("mapped", "code") else []
    return kept_flags, rows


def _defaults(flags: Flags, cfg: TrainConfig) -> Iterator[SlimeDefault]:
    """Yield the defaults of slime that this run uses and that differ from ours."""
    for default in DEFAULTS:
        if default.flag in flags or (default.needs and not any(flag in flags for flag in default.needs)):
            continue
        if default.override is None:
            yield default
            continue
        group, _, name = default.key.partition(".")
        owner = getattr(cfg, group)
        if not hasattr(owner, name) or same_value(getattr(owner, name), _value(default.override, cfg)):
            continue
        if default.key == "algo.aggregation" and cfg.algo.name in ("dr_grpo", "gspo"):
            continue
        if default.key == "algo.kl_loss_type" and getattr(cfg.algo, "kl_loss_coef", 0) == 0:
            continue
        yield replace(default, override=render(_value(default.override, cfg)))


def _value(override: str, cfg: TrainConfig) -> Any:
    """Return the value of ``override``, a text of ``DEFAULTS``; ``${rollout.top_p}`` and the like are read from ``cfg``."""
    if override.startswith("${"):
        group, _, name = override[2:-1].partition(".")
        return getattr(getattr(cfg, group), name)
    if override in ("null", "true", "false"):
        return {"null": None, "true": True, "false": False}[override]
    try:
        return float(override) if "." in override else int(override)
    except ValueError:
        return override.strip("'")
