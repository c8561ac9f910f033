"""The flags of a launch script with the values that follow them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from slime_like.errors import ConfigError
from slime_like_compat.shell.values import Value

_SHAPE = re.compile(r"--|-[A-Za-z](?!nf(inity)?$|an$)")  # of a flag, as argparse sees it: a number is a value


@dataclass(frozen=True, slots=True)
class Given:
    """One flag as a script gives it."""

    flag: str
    values: tuple[Value, ...] = ()
    file_line: str = ""

    @property
    def text(self) -> str:
        """Its values as in the script, ``?`` for one that is not known."""
        return " ".join(value.text if not value.problem else "?" for value in self.values)

    @property
    def problem(self) -> str:
        """Reason why a value of it is not known; empty if all are."""
        return next((value.problem for value in self.values if value.problem), "")

    @property
    def argv(self) -> list[str]:
        """The flag and its values as arguments."""
        return [self.flag, *(value.text for value in self.values)]


@dataclass(frozen=True, slots=True)
class Flags:
    """All flags of a script, by name: where one is given twice, the last one counts."""

    last: dict[str, Given]

    @classmethod
    def of(cls, items: Sequence[Given]) -> Flags:
        """Return the flags of a script in its order."""
        return cls({item.flag: item for item in items})

    def __contains__(self, flag: str) -> bool:
        return flag in self.last

    def text(self, flag: str, default: str = "") -> str:
        """Return the values of ``flag`` as text."""
        return self.last[flag].text if flag in self.last else default

    def positive(self, flag: str) -> bool:
        """Return whether ``flag`` has a number above 0; a value that is not known counts as one."""
        try:
            return float(self.text(flag, "0")) > 0
        except ValueError:
            return True

    @property
    def has_kl(self) -> bool:
        """True if the job uses a reference model."""
        return ("--use-kl-loss" in self and self.positive("--kl-loss-coef")) or self.positive("--kl-coef")

    @property
    def supervised(self) -> bool:
        """True if the job is supervised fine-tuning."""
        return self.text("--loss-type") == "sft_loss"


def grouped(arguments: Sequence[Value]) -> list[Given]:
    """Return flags with the values that follow them. Raises ``ConfigError`` for a word that follows no flag."""
    return list(_grouped(arguments))


def _grouped(arguments: Sequence[Value]) -> Iterator[Given]:
    current: Given | None = None
    for value in arguments:
        flag, equals, text = value.text.partition("=")
        if _SHAPE.match(value.text) and not value.problem:
            if current is not None:
                yield current
            current = Given(flag, (Value(text, value.file_line),) if equals else (), value.file_line)
        elif current is not None:
            current = replace(current, values=(*current.values, value))
        else:
            raise ConfigError(f"{value.file_line}: {value.problem or repr(value.text)}: a flag was expected here")
    if current is not None:
        yield current
