"""Output of commands that is known without running them: file names, and the numbers of ``seq``."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from slime_like.errors import ConfigError
from slime_like_compat.shell.lexer import tokens
from slime_like_compat.shell.words import MAX_WORDS, Operator, Word

_SEQ = re.compile(r"seq (-?\d+)(?: (-?\d+))?(?: (-?\d+))?")


def file_command(text: str, file_line: str) -> list[Word]:
    """Return the words of the single command in ``text``; for ``cd FOLDER && pwd`` (or ``pwd -P``), those of ``cd FOLDER``.

    Return an empty list for any other text, and for ``cd`` without ``pwd``.
    """
    try:
        script_tokens = list(tokens(text, file_line))
    except ConfigError:
        return []
    words = [word for word in script_tokens if isinstance(word, Word)]
    operators = [token.text for token in script_tokens if isinstance(token, Operator)]
    if len(words) + len(operators) < len(script_tokens):
        return []
    literals = [word.literal for word in words]
    if literals[:1] == ["cd"] and operators == ["&&"] and (literals[-1:] == ["pwd"] or literals[-2:] == ["pwd", "-P"]):
        return words[: len(words) - (1 if literals[-1] == "pwd" else 2)]
    return words if not operators and literals[:1] != ["cd"] else []


def named_file(command: str, arguments: list[str], script: Path) -> str | None:
    """Return the path or name that ``command`` prints; None if the command or its arguments are not supported.

    For ``cd``, return the path that a ``pwd`` after it prints in a script that is run in its own folder; ``cd ~``, ``cd -`` and
    options are not supported. Symbolic links in ``arguments`` are not resolved, not even for ``realpath``.
    """
    match command, arguments:
        case "cd", [folder] if not folder.startswith(("~", "-")):
            path = folder if folder.startswith("/") else f"{script.resolve().parent}/{folder}"
            return posixpath.normpath(path)
        case "dirname", [path]:
            return posixpath.dirname(path.rstrip("/")) or ("/" if path.startswith("/") else ".")
        case "basename", [path, *suffix] if len(suffix) < 2:
            name = posixpath.basename(path.rstrip("/"))
            return name.removesuffix(suffix[0]) if suffix and name != suffix[0] else name
        case "realpath", [path] if path.startswith("/"):
            return posixpath.normpath(path)
        case "readlink", ["-f", path] if path.startswith("/"):
            return posixpath.normpath(path)
        case _:
            return None


def seq(text: str) -> str | None:
    """Return what ``seq`` with whole numbers prints; None for any other text, step 0 and more than ``MAX_WORDS`` numbers."""
    match = _SEQ.fullmatch(text)
    if match is None:
        return None
    numbers = [int(number) for number in match.groups() if number is not None]
    first, step, last = (
        (1, 1, numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[1] if len(numbers) == 3 else 1, numbers[-1])
    )
    if not step or (last - first) // step >= MAX_WORDS:
        return None
    return "\n".join(map(str, range(first, last + (1 if step > 0 else -1), step)))
