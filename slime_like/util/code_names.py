"""Collection of the names in a function's code. A config key whose name is not among them counts as unread by the function."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from slime_like.util.user_code import is_user_file

READS_ALL = frozenset({"__dict__", "asdict", "astuple", "fields", "vars"})
"""Names by which code reads every field of an object without naming it."""
FOLLOWED = "slime_like.algo."  # modules of this project whose code is searched too
MAX_ITEMS = 1000  # of a container whose items are searched
MAX_OBJECTS = 20_000  # of a search


def names_in_code(function: Any) -> frozenset[str]:
    """Return the names and string constants in the code of a function, a class or an object with ``__call__``.

    Functions and classes that the code names are searched too if they belong to the user or to ``slime_like.algo``: a loss
    that calls ``slime_like.algo.loss.policy_gradient`` reads the keys that ``policy_gradient`` reads. Return ``READS_ALL`` if
    the search fails or finds too many objects.
    """
    start = function
    while isinstance(start, functools.partial):
        start = start.func
    search = _Search(str(getattr(start, "__module__", "")))
    search.add(function)
    try:
        return frozenset(search.names) if search.run() else READS_ALL
    except Exception:  # noqa: BLE001  fault boundary: attributes of the user's objects can raise anything
        return READS_ALL


class _Search:
    """Search of code for names: in ``module``'s package and folder, in the current directory and in ``slime_like.algo``."""

    def __init__(self, module: str) -> None:
        self.names: set[str] = set()
        self._package = module.partition(".")[0]  # followed even if it is installed
        file = getattr(sys.modules.get(module), "__file__", None)
        self._folders = {Path.cwd()} | ({Path(file).resolve().parent} if file else set())
        self._object_of_id: dict[int, Any] = {}  # an id stays unique because the object is kept
        self._unsearched: list[Any] = []

    def run(self) -> bool:
        """Search the pending objects. Return False if ``MAX_OBJECTS`` were added before all were searched."""
        while self._unsearched and len(self._object_of_id) < MAX_OBJECTS:
            self._search(self._unsearched.pop())
        return not self._unsearched

    def add(self, value: Any) -> None:
        """Search ``value`` later, unless it was added before."""
        if id(value) not in self._object_of_id:
            self._object_of_id[id(value)] = value
            self._unsearched.append(value)

    def _search(self, value: Any) -> None:
        """Record the names in ``value`` and queue the objects that it refers to.

        Code of libraries and containers of more than ``MAX_ITEMS`` items are skipped.
        """
        match value:
            case functools.partial():
                self._add_all((value.func, *value.args, *value.keywords.values()))
            case MethodType():
                self._add_all((value.__func__, value.__self__))
            case FunctionType() if self._is_followed(value):
                self._add_code(value.__code__, value.__globals__)
                self._add_all(_captured(value))
                self._add_all((*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()))
            case type() if self._is_followed(value):
                self._add_all(_functions(value))
                self._add_all(value.__bases__)
            case str():
                self.names.add(value)
            case dict() if len(value) <= MAX_ITEMS:
                self._add_all(value.values())
            case list() | tuple() | set() | frozenset() if len(value) <= MAX_ITEMS:
                self._add_all(value)
            case _ if self._is_followed(type(value)):
                self._add_all((type(value), *getattr(value, "__dict__", {}).values()))
            case _ if _is_wrapper(value):
                self.add(value.__wrapped__)
            case _:
                pass

    def _add_all(self, values: Iterable[Any]) -> None:
        for value in values:
            self.add(value)

    def _add_code(self, code: CodeType, variables: dict[str, Any]) -> None:
        self.names.update(code.co_names)
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                self._add_code(constant, variables)
            else:
                self.add(constant)
        values = [variables[name] for name in code.co_names if name in variables]
        self._add_all(values)
        imported_here = [sys.modules[name] for name in code.co_names if name in sys.modules]
        for module in [value for value in (*values, *imported_here) if isinstance(value, ModuleType)]:
            self._add_all(vars(module)[name] for name in code.co_names if name in vars(module))

    def _is_followed(self, value: Any) -> bool:
        name = str(getattr(value, "__module__", ""))
        if name.partition(".")[0] == self._package or name.startswith(FOLLOWED):
            return True
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is None or not is_user_file(file):
            return False
        return not self._folders.isdisjoint(Path(file).resolve().parents)


def _captured(function: FunctionType) -> Iterator[Any]:
    """Yield the values of a function's closure variables, except those that have no value yet."""
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # the variable has no value yet
            yield cell.cell_contents


def _is_wrapper(value: Any) -> bool:
    """Return whether ``value`` wraps a function, as the results of ``functools.cache`` and ``functools.wraps`` do."""
    return "__wrapped__" in getattr(value, "__dict__", ())


def _functions(kind: type) -> Iterator[Any]:
    """Yield the functions that a class defines."""
    for value in vars(kind).values():
        match value:
            case classmethod() | staticmethod():
                yield value.__func__
            case property():
                yield from (part for part in (value.fget, value.fset) if part is not None)
            case functools.cached_property():
                yield value.func
            case _ if inspect.isfunction(value) or _is_wrapper(value):
                yield value
            case _:
                pass
