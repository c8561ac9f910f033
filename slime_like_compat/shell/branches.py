"""Control flow of bash scripts.

``if``, ``case``, ``&&`` and ``||`` are followed if variables decide them, and variables of a subshell are dropped at its
end. Commands under any other condition are passed on as commands that may not run, except that a command before
``&& python train.py`` is assumed to succeed.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from slime_like_compat.shell.assignments import Assignments
from slime_like_compat.shell.conditions import both, decide, either, matches, negated, variables
from slime_like_compat.shell.tree import (
    AndOr,
    CaseBranch,
    CaseCommand,
    Command,
    CommandGroup,
    Commands,
    Function,
    IfCommand,
    LoopCommand,
    Pipeline,
    SimpleCommand,
    simple_commands,
    simple_commands_of,
)
from slime_like_compat.shell.values import Scope, Value
from slime_like_compat.shell.words import Token, Word

type Run = Callable[[Sequence[Token], str], None]
"""Function that is called with a command's words and the condition under which it runs, empty if it surely runs."""


@dataclass(slots=True)
class Branches:
    """Interpreter of a script's control flow that calls ``run`` for each command that may run.

    A result tells whether commands succeed: True or False, or None if it depends on a command or an unknown variable, or on a
    condition that is not supported.
    """

    scope: Scope
    script: Path
    run: Run
    starts: Callable[[Sequence[Token]], bool]  # True for the words of a command that starts training
    condition_text: str = ""  # condition under which the current commands run, for messages; empty if they run
    repeats: bool = False  # in a loop or function: a variable may have another value when its commands run again

    def follow(self, commands: Commands) -> bool | None:
        """Interpret ``commands`` and return the result of the last one; True if it runs in the background or there is none."""
        result: bool | None = True
        for item in commands:
            with self.scope.subshell() if item.background else nullcontext():
                result = self._and_or(item)
            result = item.background or result
        return result

    def _and_or(self, item: AndOr) -> bool | None:
        result, words = self._pipeline(item.first), _words(simple_commands_of(item.first))
        for sign, pipeline in item.next_pipelines:
            runs = result if sign == "&&" else negated(result)
            if runs is False:
                continue
            # a command before ``&& python train.py`` prepares training, so its success is assumed
            starts = sign == "&&" and any(self.starts(command.words) for command in simple_commands_of(pipeline))
            condition = self.condition_text or f"only if another command succeeds{self._decided_by(words)}"
            with self._under(condition) if runs is None and not starts else nullcontext():
                second = self._pipeline(pipeline)
            result = both(result, second) if sign == "&&" else either(result, second)
            words += _words(simple_commands_of(pipeline))
        return result

    def _pipeline(self, item: Pipeline) -> bool | None:
        results: list[bool | None] = []
        for command in item.commands:
            with self.scope.subshell() if len(item.commands) > 1 else nullcontext():
                results.append(self._command(command))
        *earlier_results, result = results
        if any(earlier is not True for earlier in earlier_results):  # may fail the pipeline under set -o pipefail
            result = both(result, None)
        return negated(result) if item.negated else result

    def _command(self, command: Command) -> bool | None:
        match command:
            case SimpleCommand(words=words):
                return self._simple(words)
            case CommandGroup(body=body, subshell=subshell):
                with self.scope.subshell() if subshell else nullcontext():
                    return self.follow(body)
            case IfCommand():
                return self._if(command)
            case CaseCommand():
                return self._case(command)
            case LoopCommand():
                return self._loop(command)
            case Function(body=body, file_line=file_line):
                with self._under(_block(file_line), repeats=True):
                    self._command(body)
                return True

    def _simple(self, words: Sequence[Token]) -> bool | None:
        plain = [word for word in words if isinstance(word, Word)]
        is_constant = len(plain) == len(words) and self._is_constant(plain)
        result = decide(plain, self.scope, self.script) if is_constant else None
        self.run(words, self.condition_text)
        return result

    def _if(self, command: IfCommand) -> bool | None:
        earlier_ran: bool | None = False  # True if an earlier branch ran
        result: bool | None = True
        words: list[Word] = []
        for condition, body in (*command.branches, ((), command.otherwise)):
            words += _words(simple_commands(condition))
            reason = _block(command.file_line) + self._decided_by(words)
            holds = self._follow_if(negated(earlier_ran), condition, reason)
            runs = both(negated(earlier_ran), holds)
            if runs is not False:
                body_result = self._follow_if(runs, body, reason)
                result = body_result if runs else None
            earlier_ran = either(earlier_ran, holds)
        return result

    def _case(self, command: CaseCommand) -> bool | None:
        has_matched: bool | None = False  # True if an earlier pattern matched
        falls_through: bool | None = False  # True if the previous branch ran and ends in ``;&``
        result: bool | None = True
        reason = _block(command.file_line) + self._decided_by([command.subject])
        subject = self.scope.text(command.subject, self.script)
        if not self._is_constant([command.subject]):
            subject = Value("", subject.file_line, "may change")
        for branch in command.branches:
            is_match = self._matches(subject, branch)
            runs = either(both(negated(has_matched), is_match), falls_through)
            if runs is not False:
                body_result = self._follow_if(runs, branch.body, reason)
                result = body_result if runs else None
            has_matched = both(has_matched, negated(runs)) if branch.end == ";;&" else either(has_matched, is_match)
            falls_through = runs if branch.end == ";&" else False
        return result

    def _matches(self, subject: Value, branch: CaseBranch) -> bool | None:
        result: bool | None = False
        for pattern in branch.patterns:
            is_match = matches(subject, pattern, self.scope, self.script) if self._is_constant([pattern]) else None
            result = either(result, is_match)
        return result

    def _loop(self, command: LoopCommand) -> bool | None:
        with self._under(_block(command.file_line), repeats=True):
            variables_of_head = Assignments(self.scope, self.script, self.condition_text)
            variables_of_head.expand(command.head)
            variables_of_head.taint(command.head[:1])
            holds = self.follow(command.condition)
            if holds is not (command.keyword == "until"):
                self.follow(command.body)
        return None

    def _follow_if(self, runs: bool | None, commands: Commands, reason: str) -> bool | None:
        """Interpret ``commands`` and return the result of the last one.

        If ``runs`` is None, the commands may run, and get the condition ``reason``. If ``runs`` is False, they are not
        interpreted, and the result is None.
        """
        if runs is False:
            return None
        with self._under(reason) if runs is None else nullcontext():
            return self.follow(commands)

    @contextmanager
    def _under(self, reason: str, *, repeats: bool = False) -> Generator[None]:
        """Use ``reason`` as the condition of the commands interpreted in the ``with`` block; ``repeats``: they may run again."""
        outer = self.condition_text, self.repeats
        self.condition_text, self.repeats = reason, self.repeats or repeats
        try:
            yield
        finally:
            self.condition_text, self.repeats = outer

    def _is_constant(self, words: Sequence[Word]) -> bool:
        """Return whether ``words`` surely expand to the same text whenever their command runs."""
        parts = [part for word in words for part in word.parts]
        return not self.repeats or all(part.kind == "text" or part.text in self.scope.user_values for part in parts)

    def _decided_by(self, words: Sequence[Word]) -> str:
        """Return the end of a message that names the first unknown variable in ``words``; an empty text if all are known."""
        for name in variables(words):
            values = self.scope.lookup(name, "")
            if values is None or any(value.problem for value in values):
                return f", which --set {name}=VALUE may decide"
        return ""


def _block(file_line: str) -> str:
    return f"inside the block that begins at {file_line}"


def _words(commands: Iterable[SimpleCommand]) -> list[Word]:
    return [word for command in commands for word in command.words if isinstance(word, Word)]
