"""Flags of a launch script with the values that follow them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from slime_like.errors import ConfigError
from slime_like_compat.shell.values import Value

_FLAG = re.compile(r"--|-[A-Za-z](?!nf(inity)?$|an$)")  # start of a flag for argparse; -1 and -inf are values


@dataclass(frozen=True, slots=True)
class FlagOccurrence:
    """One use of a flag in a script, with its values."""

    flag: str
    values: tuple[Value, ...] = ()
    file_line: str = ""

    @property
    def text(self) -> str:
        """Expanded values, joined by blanks, with ``?`` for an unknown value."""
        return " ".join(value.text if not value.problem else "?" for value in self.values)

    @property
    def problem(self) -> str:
        """Reason why a value is unknown; empty if all values are known."""
        return next((value.problem for value in self.values if value.problem), "")

    @property
    def argv(self) -> list[str]:
        """Flag and values as command-line arguments."""
        return [self.flag, *(value.text for value in self.values)]


@dataclass(frozen=True, slots=True)
class Flags:
    """Flags of a script by name. The last occurrence of a repeated flag counts."""

    by_name: dict[str, FlagOccurrence]

    @classmethod
    def of(cls, items: Sequence[FlagOccurrence]) -> Flags:
        """Return ``items`` by flag. They must be in the order of the script, as the last occurrence of a flag counts."""
        return cls({item.flag: item for item in items})

    def __contains__(self, flag: str) -> bool:
        return flag in self.by_name

    def text(self, flag: str, default: str = "") -> str:
        """Return the values of ``flag`` as text; ``default`` if the flag is not given."""
        return self.by_name[flag].text if flag in self.by_name else default

    def is_positive(self, flag: str) -> bool:
        """Return whether ``flag`` is given with a number above 0, or with a value that is unknown or not a number."""
        try:
            return float(self.text(flag, "0")) > 0
        except ValueError:
            return True

    @property
    def has_kl(self) -> bool:
        """True if flags ask for a KL to a reference model. Supervised fine-tuning ignores these flags."""
        return ("--use-kl-loss" in self and self.is_positive("--kl-loss-coef")) or self.is_positive("--kl-coef")

    @property
    def is_supervised(self) -> bool:
        """True if the job is supervised fine-tuning."""
        return self.text("--loss-type") == "sft_loss"


def group_by_flag(arguments: Sequence[Value]) -> list[FlagOccurrence]:
    """Return each flag with the values that follow it. Raises ``ConfigError`` for a value before the first flag."""
    return list(_occurrences(arguments))


def _occurrences(arguments: Sequence[Value]) -> Iterator[FlagOccurrence]:
    current: FlagOccurrence | None = None
    for value in arguments:
        flag, equals, text = value.text.partition("=")
        if _FLAG.match(value.text) and not value.problem:
            if current is not None:
                yield current
            current = FlagOccurrence(flag, (Value(text, value.file_line),) if equals else (), value.file_line)
        elif current is not None:
            current = replace(current, values=(*current.values, value))
        else:
            raise ConfigError(
                f"{value.file_line}: {value.problem or repr(value.text)}: a flag was expected here; write one that begins with --"
            )
    if current is not None:
        yield current
