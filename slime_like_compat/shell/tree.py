"""Syntax tree of bash commands: lists of pipelines, groups, branches, loops and functions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from slime_like_compat.shell.words import Token, Word


@dataclass(frozen=True, slots=True)
class SimpleCommand:
    """Command and its words; also ``[[ ... ]]`` and ``((...))``."""

    words: tuple[Token, ...]


@dataclass(frozen=True, slots=True)
class CommandGroup:
    """Group ``{ ...; }``, or a subshell ``( ... )`` or ``coproc``."""

    body: Commands
    subshell: bool


@dataclass(frozen=True, slots=True)
class IfCommand:
    """``if`` command, with the body that runs if no condition holds."""

    branches: tuple[tuple[Commands, Commands], ...]  # (condition, body)
    otherwise: Commands
    file_line: str  # file:line


@dataclass(frozen=True, slots=True)
class CaseBranch:
    """Branch of ``case``."""

    patterns: tuple[Word, ...]
    body: Commands
    end: str  # ``;;``, ``;&``, ``;;&``, or empty before ``esac``


@dataclass(frozen=True, slots=True)
class CaseCommand:
    """``case`` command."""

    subject: Word
    branches: tuple[CaseBranch, ...]
    file_line: str


@dataclass(frozen=True, slots=True)
class LoopCommand:
    """Loop: ``for``, ``select``, ``while`` or ``until``."""

    keyword: str
    head: tuple[Token, ...]  # head of ``for``: NAME and its words, or ``((...))``
    condition: Commands  # condition of ``while`` and ``until``
    body: Commands
    file_line: str


@dataclass(frozen=True, slots=True)
class Function:
    """Definition of a function."""

    body: Command
    file_line: str


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Commands joined by ``|``, or a single command."""

    commands: tuple[Command, ...]
    negated: bool


@dataclass(frozen=True, slots=True)
class AndOr:
    """Pipelines joined by ``&&`` and ``||``, or a single pipeline."""

    first: Pipeline
    next_pipelines: tuple[tuple[str, Pipeline], ...]
    background: bool


type Command = SimpleCommand | CommandGroup | IfCommand | CaseCommand | LoopCommand | Function
type Commands = tuple[AndOr, ...]


def simple_commands(commands: Commands) -> Iterator[SimpleCommand]:
    """Yield every simple command in ``commands``, at any depth."""
    for item in commands:
        for pipeline in (item.first, *(pipeline for _, pipeline in item.next_pipelines)):
            yield from simple_commands_of(pipeline)


def simple_commands_of(pipeline: Pipeline) -> Iterator[SimpleCommand]:
    """Yield every simple command in ``pipeline``, at any depth."""
    for command in pipeline.commands:
        yield from _within(command)


def _within(command: Command) -> Iterator[SimpleCommand]:
    match command:
        case SimpleCommand():
            yield command
        case CommandGroup(body=body):
            yield from simple_commands(body)
        case IfCommand(branches=branches, otherwise=otherwise):
            for condition, body in branches:
                yield from simple_commands((*condition, *body))
            yield from simple_commands(otherwise)
        case CaseCommand(branches=branches):
            for branch in branches:
                yield from simple_commands(branch.body)
        case LoopCommand(condition=condition, body=body):
            yield from simple_commands((*condition, *body))
        case Function(body=body):
            yield from _within(body)
