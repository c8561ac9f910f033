"""Parser of bash scripts into the nodes of ``tree``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slime_like.errors import ConfigError
from slime_like_compat.shell.lexer import tokens
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
)
from slime_like_compat.shell.words import Array, Operator, Token, Word

_BRANCH_ENDS = (";;", ";&", ";;&")
_NO_COMMAND = ("then", "elif", "else", "fi", "do", "done", "esac", "}", ")", "&&", "||", "|", "|&", *_BRANCH_ENDS)
_COMMAND_ENDS = (";", "&", "\n", ")", "&&", "||", "|", "|&", *_BRANCH_ENDS)


def parse(text: str, name: str) -> Commands:
    """Parse the script ``text`` of the file ``name``.

    Raises ``ConfigError`` if the text is too long, or if its syntax is wrong or not supported; an error of syntax names the
    line. Raises ``RecursionError`` if blocks are nested too deeply.
    """
    parser = _Parser((*tokens(text, name), Operator("", f"{name}:{text.count('\n') + 1}")))
    commands = parser.commands()
    if not parser.at_end:
        raise parser.unexpected()
    return commands


@dataclass(slots=True)
class _Parser:
    tokens: Sequence[Token]  # the last one marks the end of the script
    at: int = 0

    @property
    def next(self) -> Token:
        return self.tokens[self.at]

    @property
    def at_end(self) -> bool:
        return self.at == len(self.tokens) - 1

    @property
    def sign(self) -> str:
        """Return the next token if it is an operator or may be a keyword, else an empty text."""
        match self.next:
            case Operator(text=text):
                return text
            case Word() as word:
                return word.keyword
            case Array():
                return ""

    def unexpected(self) -> ConfigError:
        """Return the error for an unexpected next token."""
        text = self.next.name if isinstance(self.next, Array) else self.sign
        return ConfigError(f"{self.next.file_line}: {text!r} is not expected here: give a script that bash can read")

    def commands(self, *ends: str) -> Commands:
        """Parse commands up to one of ``ends`` or the end of the script. Raises ``ConfigError`` for a syntax error."""
        commands: list[AndOr] = []
        while True:
            self._skip("\n", ";")
            if self.at_end or self.sign in ends:
                return tuple(commands)
            commands.append(self._and_or())

    def _accept(self, *signs: str) -> str:
        """Consume and return the next token if it is one of ``signs``, else return an empty text."""
        sign = self.sign
        if self.at_end or sign not in signs:
            return ""
        self.at += 1
        return sign

    def _skip(self, *signs: str) -> None:
        while self._accept(*signs):
            pass

    def _expect(self, sign: str, opener: Token, name: str) -> None:
        """Consume ``sign``, the next part of the construct ``name`` that begins at ``opener``.

        Raises ``ConfigError`` if the next token is not ``sign``.
        """
        if self.at_end:
            raise ConfigError(f"{opener.file_line}: this {name!r} has no {sign!r}: add it")
        if self.sign != sign:
            raise self.unexpected()
        self.at += 1

    def _and_or(self) -> AndOr:
        first = self._pipeline()
        following: list[tuple[str, Pipeline]] = []
        while sign := self._accept("&&", "||"):
            self._skip("\n")
            following.append((sign, self._pipeline()))
        return AndOr(first, tuple(following), bool(self._accept("&")))

    def _pipeline(self) -> Pipeline:
        negated = False
        while prefix := self._accept("!", "time"):
            negated ^= prefix == "!"
            self._skip("-p")
        commands = [self._command()]
        while self._accept("|", "|&"):
            self._skip("\n")
            commands.append(self._command())
        return Pipeline(tuple(commands), negated)

    def _command(self) -> Command:
        match self.sign:
            case "{":
                return self._group("}")
            case "(":
                return self._group(")")
            case "if":
                return self._if()
            case "case":
                return self._case()
            case "for" | "select":
                return self._for()
            case "while" | "until":
                return self._while()
            case "function":
                self.at += 1
                return self._function()
            case "coproc":
                return self._coprocess()
            case "[[":
                return self._test()
            case sign if sign in _NO_COMMAND:
                raise self.unexpected()
            case _:
                return self._simple()

    def _group(self, closer: str) -> CommandGroup:
        opener, name = self.next, self.sign
        self.at += 1
        body = self.commands(closer)
        self._expect(closer, opener, name)
        return CommandGroup(body, subshell=closer == ")")

    def _if(self) -> IfCommand:
        opener, branches = self.next, list[tuple[Commands, Commands]]()
        while self._accept("if", "elif"):
            condition = self.commands("then")
            self._expect("then", opener, "if")
            branches.append((condition, self.commands("elif", "else", "fi")))
        otherwise: Commands = ()
        if self._accept("else"):
            otherwise = self.commands("fi")
        self._expect("fi", opener, "if")
        return IfCommand(tuple(branches), otherwise, opener.file_line)

    def _case(self) -> CaseCommand:
        opener = self.next
        self.at += 1
        subject = self.next
        if not isinstance(subject, Word):
            raise self.unexpected()
        self.at += 1
        self._skip("\n")
        self._expect("in", opener, "case")
        branches: list[CaseBranch] = []
        self._skip("\n")
        while not self.at_end and self.sign != "esac":
            branches.append(self._branch(opener))
            self._skip("\n")
        self._expect("esac", opener, "case")
        return CaseCommand(subject, tuple(branches), opener.file_line)

    def _branch(self, opener: Token) -> CaseBranch:
        self._accept("(")
        patterns: list[Word] = []
        while not self.at_end and self.sign != ")":
            if isinstance(self.next, Word):
                patterns.append(self.next)
            elif self.sign != "|":
                raise self.unexpected()
            self.at += 1
        self._expect(")", opener, "case")
        body = self.commands(*_BRANCH_ENDS, "esac")
        return CaseBranch(tuple(patterns), body, self._accept(*_BRANCH_ENDS))

    def _for(self) -> LoopCommand:
        opener = self.next
        self.at += 1
        head = [self.next]
        self.at += not self.at_end
        self._skip("\n")
        if self._accept("in"):
            while not self.at_end and self.sign not in _COMMAND_ENDS:
                head.append(self.next)
                self.at += 1
        self._skip(";", "\n")
        return LoopCommand("for", tuple(head), (), self._body(opener, "for"), opener.file_line)

    def _while(self) -> LoopCommand:
        opener, keyword = self.next, self.sign
        self.at += 1
        condition = self.commands("do")
        return LoopCommand(keyword, (), condition, self._body(opener, keyword), opener.file_line)

    def _body(self, opener: Token, name: str) -> Commands:
        closer = "}" if self.sign == "{" else "done"  # for ((...)) { ...; }
        self._expect("{" if closer == "}" else "do", opener, name)
        body = self.commands(closer)
        self._expect(closer, opener, name)
        return body

    def _function(self) -> Function:
        """Parse a function, starting at its name."""
        file_line = self.next.file_line
        self.at += not self.at_end
        if self._accept("("):
            self._expect(")", self.tokens[self.at - 1], "(")
        self._skip("\n")
        return Function(self._command(), file_line)

    def _coprocess(self) -> CommandGroup:
        self.at += 1
        next_token = self.tokens[self.at + 1] if not self.at_end else None
        self.at += isinstance(next_token, Word) and next_token.keyword == "{"  # coproc NAME { ...; }
        return CommandGroup((AndOr(Pipeline((self._command(),), negated=False), (), background=True),), subshell=True)

    def _test(self) -> SimpleCommand:
        """Parse ``[[ ... ]]``, in which operators have a different meaning."""
        opener, start = self.next, self.at
        while not self.at_end and self.sign != "]]":
            self.at += 1
        self._expect("]]", opener, "[[")
        return SimpleCommand(tuple(self.tokens[start : self.at]))

    def _simple(self) -> Command:
        start, words = self.at, list[Token]()
        while not self.at_end and not (isinstance(self.next, Operator) and self.next.text in _COMMAND_ENDS):
            if self.sign != "(":
                words.append(self.next)
                self.at += 1
            elif (
                len(words) == 1
                and isinstance(following := self.tokens[self.at + 1], Operator)
                and following.text == ")"
            ):
                self.at = start
                return self._function()
            else:
                self._skip_parentheses()
        return SimpleCommand(tuple(words))

    def _skip_parentheses(self) -> None:
        """Skip ``( ... )`` inside a command: a pattern of ``shopt -s extglob``, which sets no variable."""
        opener, depth = self.next, 0
        while not self.at_end:
            depth += {"(": 1, ")": -1}.get(self.sign, 0)
            self.at += 1
            if not depth:
                return
        self._expect(")", opener, "(")
