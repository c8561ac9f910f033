"""Report row of one flag of slime's ``train.py``. The row may depend on the other flags of the job."""

from __future__ import annotations

from dataclasses import replace

from slime_like.config.rules import foreign
from slime_like.errors import ConfigError
from slime_like_compat.conversion_rows import ENGINE_MEMORY_NOTE, MAX_ENGINE_MEMORY, Row
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
from slime_like_compat.slime.occurrences import FlagOccurrence, Flags
from slime_like_compat.slime.special import VERDICT_FUNCTIONS

SECRETS = ("--wandb-key",)
SFT_FLAGS = ("--loss-type", "--rollout-function-path", "--disable-compute-advantages-and-returns")


def row_of(item: FlagOccurrence, flags: Flags) -> Row:
    """Return the report row of ``item``. Raises ``ConfigError`` for a value that belongs to no flag.

    The function that a flag of ``special.CODE`` names is imported to check its signature.
    """
    value_text = item.text if item.flag not in SECRETS else "(not shown)"
    row = Row(item.flag, value_text, item.file_line, "mapped", keys_of(item.flag))
    if flags.is_supervised and _is_policy_option(item.flag):
        return replace(
            row, verdict="dropped", keys=(), note="has no effect with --loss-type sft_loss, in slime as well"
        )
    if verdict_function := VERDICT_FUNCTIONS.get(item.flag):
        verdict_note = verdict_function(item, flags)
        if verdict_note is not None:
            verdict, note = verdict_note
            return replace(row, verdict=verdict, keys=row.keys if verdict in ("mapped", "code") else (), note=note)
    if item.flag in REFUSED:
        verdict = "dropped" if item.flag in HARMLESS else "refused"
        return replace(row, verdict=verdict, keys=(), note=_shortened(REFUSED[item.flag], item.flag))
    if item.problem:
        return _row_of_unknown_value(row, item)
    if error := _translation_error(item, [value.text for value in item.values]):
        return replace(row, verdict=_verdict_on_error(item.flag, error), keys=(), note=_shortened(error, item.flag))
    if item.flag in ALWAYS:
        return replace(row, verdict="always", note=ALWAYS[item.flag][1])
    if not row.keys:
        row = replace(row, keys=tuple(text.partition("=")[0] for text in translate(item.argv).overrides))
    return replace(row, note=_note(item, flags))


def keys_of(flag: str) -> tuple[str, ...]:
    """Return the keys that a flag of ``flags.table`` sets.

    Empty for a flag that sets none, and for a flag outside the table, such as one that sets a field of SGLang or Megatron.
    """
    if flag in COMBINED:
        return COMBINED[flag]
    for table in (VALUES, LISTS, SWITCHES):
        if flag in table:
            step_keys = ("loop.steps_per_rollout",) if flag == "--global-batch-size" else ()
            return (table[flag][0], *step_keys)
    return ()


def _is_policy_option(flag: str) -> bool:
    """Return whether a flag sets an option of a policy loss, which supervised fine-tuning does not read."""
    keys = keys_of(flag) if flag not in SFT_FLAGS else ()
    return bool(keys) and all(key.partition(".")[0] == "algo" and key != "algo.aggregation" for key in keys)


def _row_of_unknown_value(row: Row, item: FlagOccurrence) -> Row:
    """Return the row of a flag with an unknown value: ``needed``, unless our ``train.py`` seems to reject every value.

    A flag without a key of its own is tried with the value true. Any field of SGLang or Megatron accepts it, unless the field
    cannot be set at all. If ``train.py`` rejects it, the row gives the error.
    """
    has_key = bool(keys_of(item.flag)) or item.flag in ALWAYS
    error = "" if has_key else _translation_error(FlagOccurrence(item.flag), ["true"])
    if not error:
        return replace(row, verdict="needed", note=f"{item.problem}, or --drop={item.flag}")
    return replace(row, verdict=_verdict_on_error(item.flag, error), keys=(), note=_shortened(error, item.flag))


def _verdict_on_error(flag: str, error: str) -> str:
    """Return the verdict on a flag that our ``train.py`` would refuse with ``error``."""
    owner = foreign.OWNED[foreign.MEGATRON].get(flag.removeprefix("--").replace("-", "_"))
    if flag in HARMLESS or owner in (foreign.SHAPE, foreign.TE_EXPERTS):
        return "dropped"
    if flag.startswith("--sglang-"):
        owner = foreign.OWNED[foreign.SGLANG].get(flag.removeprefix("--sglang-").replace("-", "_"), "")
        if owner.startswith("the "):
            return "dropped"
    return "unknown" if "is unknown" in error and flag not in VALUES else "refused"


def _shortened(message: str, flag: str) -> str:
    """Return the note of a row for ``flag``: ``message`` without the flag's name and without the advice to remove the flag.

    ``message`` is an error of our ``train.py`` or a text of ``REFUSED``. Another note replaces a message that begins with
    "belongs to config.json", and an empty one.
    """
    message = message.removeprefix(f"{flag} ").removeprefix("is unknown: ")
    if message.startswith("belongs to config.json"):
        return "config.json of --hf-checkpoint has this value"
    for text in (": remove the flag, and set it there", ": remove the flag", "; remove the flag"):
        message = message.removesuffix(text)
    return message or "there is no such feature here"


def _translation_error(item: FlagOccurrence, values: list[str]) -> str:
    """Return our ``train.py``'s error message for the flag alone; empty if there is none, or for a flag of ``COMBINED``.

    Raises ``ConfigError`` for a value that belongs to no flag.
    """
    if item.flag in COMBINED:
        return ""
    try:
        overrides = translate([item.flag, *values]).overrides
    except ConfigError as error:
        return str(error)
    if values_as_overrides := [value for value in item.values if value.text in overrides]:
        raise ConfigError(
            f"{values_as_overrides[0].file_line}: {values_as_overrides[0].text!r} belongs to no flag, as {item.flag} takes fewer values: remove it"
        )
    return ""


def _above(text: str, bound: float) -> bool:
    """Return whether ``text`` is a number above ``bound``."""
    try:
        return float(text) > bound
    except ValueError:
        return False  # load_config refuses the value


def _note(item: FlagOccurrence, flags: Flags) -> str:
    if item.flag == "--sglang-mem-fraction-static" and "--colocate" in flags and _above(item.text, MAX_ENGINE_MEMORY):
        return ENGINE_MEMORY_NOTE
    if item.flag.startswith("--sglang-") and item.flag not in VALUES and item.flag not in COMBINED:
        return f"a field of {foreign.source(foreign.SGLANG)}"
    return ""
