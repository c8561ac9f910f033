"""Report row of one flag of slime's ``train.py``, judged together with the other flags of the job."""

from __future__ import annotations

from dataclasses import replace

from slime_like.config.rules import foreign
from slime_like.errors import ConfigError
from slime_like_compat.conversion_rows import Row
from slime_like_compat.flags.table import (
    ALWAYS,
    COMBINED,
    LISTS,
    REFUSED,
    SWITCHES,
    VALUES,
)
from slime_like_compat.flags.translate import translate
from slime_like_compat.flags.without_key import HARMLESS
from slime_like_compat.slime.given import Flags, Given
from slime_like_compat.slime.special import SPECIAL

OFFLOADED = 0.5
SECRETS = ("--wandb-key",)
SFT_FLAGS = ("--loss-type", "--rollout-function-path", "--disable-compute-advantages-and-returns")


def row_of(item: Given, flags: Flags) -> Row:
    """Return the row of ``item``. Raises ``ConfigError`` for a word that belongs to no flag."""
    shown = item.text if item.flag not in SECRETS else "(not shown)"
    row = Row(item.flag, shown, item.file_line, "mapped", keys_of(item.flag))
    if flags.supervised and _of_a_policy(item.flag):
        return replace(row, verdict="dropped", keys=(), note="has no effect on --loss-type sft_loss, in slime as well")
    if special := SPECIAL.get(item.flag):
        verdict_note = special(item, flags)
        if verdict_note is not None:
            verdict, note = verdict_note
            return replace(row, verdict=verdict, keys=row.keys if verdict in ("mapped", "code") else (), note=note)
    if item.flag in REFUSED:
        verdict = "dropped" if item.flag in HARMLESS else "refused"
        return replace(row, verdict=verdict, keys=(), note=_reason(REFUSED[item.flag], item.flag))
    if item.problem:
        return _unknown_value(row, item)
    if reason := _refusal(item, [value.text for value in item.values]):
        return replace(row, verdict=_refused(item.flag, reason), keys=(), note=_reason(reason, item.flag))
    if item.flag in ALWAYS:
        return replace(row, verdict="always", note=ALWAYS[item.flag][1])
    if not row.keys:
        row = replace(row, keys=tuple(text.partition("=")[0] for text in translate(item.argv).overrides))
    return replace(row, note=_note(item, flags))


def keys_of(flag: str) -> tuple[str, ...]:
    """Return the keys that a flag sets; empty if it sets none."""
    if flag in COMBINED:
        return COMBINED[flag]
    for table in (VALUES, LISTS, SWITCHES):
        if flag in table:
            step_keys = ("loop.steps_per_rollout",) if flag == "--global-batch-size" else ()
            return (table[flag][0], *step_keys)
    return ()


def _of_a_policy(flag: str) -> bool:
    """Return whether a flag sets an option of an algorithm that supervised fine-tuning does not read."""
    keys = keys_of(flag) if flag not in SFT_FLAGS else ()
    return bool(keys) and all(key.partition(".")[0] == "algo" and key != "algo.aggregation" for key in keys)


def _unknown_value(row: Row, item: Given) -> Row:
    """Return the row of a value that only a command prints: needed if the recipe would hold it."""
    if keys_of(item.flag) or item.flag in ALWAYS or not (reason := _refusal(Given(item.flag), ["1"])):
        return replace(row, verdict="needed", note=f"{item.problem}, or --drop={item.flag}")
    return replace(row, verdict=_refused(item.flag, reason), keys=(), note=_reason(reason, item.flag))


def _refused(flag: str, reason: str) -> str:
    """Return the verdict on a flag that ``train.py`` would refuse."""
    owner = foreign.OWNED[foreign.MEGATRON].get(flag.removeprefix("--").replace("-", "_"))
    if flag in HARMLESS or owner in (foreign.SHAPE, foreign.TE_EXPERTS):
        return "dropped"
    if flag.startswith("--sglang-"):
        owner = foreign.OWNED[foreign.SGLANG].get(flag.removeprefix("--sglang-").replace("-", "_"), "")
        if owner.startswith("the "):
            return "dropped"
    return "unknown" if "is unknown" in reason and flag not in VALUES else "refused"


def _reason(message: str, flag: str) -> str:
    """Shorten a refusal of ``train.py`` for a table whose row begins with the flag."""
    message = message.removeprefix(f"{flag} ").removeprefix("is unknown: ")
    if message.startswith("belongs to config.json"):
        return "config.json of --hf-checkpoint says it"
    for text in (": remove the flag, and set it there", ": remove the flag", "; remove the flag"):
        message = message.removesuffix(text)
    return message or "there is no such feature here"


def _refusal(item: Given, values: list[str]) -> str:
    """Return why ``train.py`` would refuse the flag alone; empty if it would not, or if the flag is read with others."""
    if item.flag in COMBINED:
        return ""
    try:
        overrides = translate([item.flag, *values]).overrides
    except ConfigError as error:
        return str(error)
    if stray := [value for value in item.values if value.text in overrides]:
        raise ConfigError(f"{stray[0].file_line}: {stray[0].text!r} belongs to no flag: {item.flag} takes fewer values")
    return ""


def _above(text: str, bound: float) -> bool:
    """Return whether ``text`` is a number above ``bound``."""
    try:
        return float(text) > bound
    except ValueError:
        return False  # refused at load, by flag and place


def _note(item: Given, flags: Flags) -> str:
    if item.flag == "--sglang-mem-fraction-static" and "--colocate" in flags and _above(item.text, OFFLOADED):
        return "slime moves the trainer out while engines sample; here both stay on the GPUs: lower it to what train.py --plan leaves"
    if item.flag.startswith("--sglang-") and item.flag not in VALUES and item.flag not in COMBINED:
        return f"a field of {foreign.source(foreign.SGLANG)}"
    return ""
