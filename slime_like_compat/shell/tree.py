"""The commands of a bash script as a tree: lists of pipelines, groups, branches, loops and functions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from slime_like_compat.shell.words import Token, Word


@dataclass(frozen=True, slots=True)
class Simple:
    """A command and its words; ``[[ ... ]]`` and ``((...))`` too."""

    words: tuple[Token, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """``{ ...; }``, or ``( ... )`` and ``coproc``, which are subshells."""

    body: Commands
    subshell: bool


@dataclass(frozen=True, slots=True)
class If:
    """``if``, with the body that runs where no condition holds."""

    branches: tuple[tuple[Commands, Commands], ...]  # (condition, body)
    otherwise: Commands
    where: str  # file:line


@dataclass(frozen=True, slots=True)
class Branch:
    """A branch of ``case``."""

    patterns: tuple[Word, ...]
    body: Commands
    end: str  # ``;;``, ``;&``, ``;;&``, or empty before ``esac``


@dataclass(frozen=True, slots=True)
class Case:
    """``case``."""

    subject: Word
    branches: tuple[Branch, ...]
    where: str


@dataclass(frozen=True, slots=True)
class Loop:
    """``for``, ``select``, ``while`` or ``until``."""

    keyword: str
    head: tuple[Token, ...]  # of for: NAME and its words, or ``((...))``
    condition: Commands  # of while and until
    body: Commands
    where: str


@dataclass(frozen=True, slots=True)
class Function:
    """The definition of a function."""

    body: Command
    where: str


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Commands between ``|``."""

    commands: tuple[Command, ...]
    negated: bool


@dataclass(frozen=True, slots=True)
class AndOr:
    """Pipelines between ``&&`` and ``||``."""

    first: Pipeline
    rest: tuple[tuple[str, Pipeline], ...]
    background: bool


type Command = Simple | Group | If | Case | Loop | Function
type Commands = tuple[AndOr, ...]


def simple_commands(commands: Commands) -> Iterator[Simple]:
    """Yield every simple command in ``commands``, whatever it lies in."""
    for item in commands:
        for pipeline in (item.first, *(pipeline for _, pipeline in item.rest)):
            yield from simple_commands_of(pipeline)


def simple_commands_of(pipeline: Pipeline) -> Iterator[Simple]:
    """Yield every simple command in ``pipeline``, whatever it lies in."""
    for command in pipeline.commands:
        yield from _within(command)


def _within(command: Command) -> Iterator[Simple]:
    match command:
        case Simple():
            yield command
        case Group(body=body):
            yield from simple_commands(body)
        case If(branches=branches, otherwise=otherwise):
            for condition, body in branches:
                yield from simple_commands((*condition, *body))
            yield from simple_commands(otherwise)
        case Case(branches=branches):
            for branch in branches:
                yield from simple_commands(branch.body)
        case Loop(condition=condition, body=body):
            yield from simple_commands((*condition, *body))
        case Function(body=body):
            yield from _within(body)
