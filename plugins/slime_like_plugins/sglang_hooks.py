"""Installation of runtime hooks into SGLang. Each hook is verified to be in place; a missing hook stops the engine.

SGLang's ``HookRegistry`` logs and swallows every error, so an engine would serve without a hook whose target was renamed
upstream. ``install`` registers hooks, applies them and then checks the targets.
"""

from __future__ import annotations

import importlib
import operator
import os
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

PLUGINS_VARIABLE = "SLIME_LIKE_SGLANG"  # comma-separated plugins to enable in this process and its children
HELD_PART = "_slime_like_held_part"
"""Attribute of a sharded weight: the shard of this process. The weight's own memory is a buffer that several weights share."""
SEARCH = (
    "_propagate_patch"  # SGLang's function that replaces names of a hooked function in the modules that imported it
)
_loaded: set[str] = set()


def enabled(name: str) -> bool:
    """Return True if ``SLIME_LIKE_SGLANG`` names the plugin ``name``.

    Plugins are off by default, because entry points load in every SGLang process.
    """
    return name in _enabled_names()


def _enabled_names() -> list[str]:
    return [name for part in os.environ.get(PLUGINS_VARIABLE, "").split(",") if (name := part.strip())]


def record_loaded(name: str) -> None:
    """Record that plugin ``name`` is in place in this process. Entry points call this last."""
    _loaded.add(name)


def setting_of(field: str) -> str:
    """Return, for a message, the configuration key and the command-line flag that set ``field`` of ServerArgs."""
    return f"rollout.sglang.{field} (--{field.replace('_', '-')})"


def fix_of(field: str, required: object) -> str:
    """Return advice, for an error message, to give ``field`` of ServerArgs the value ``required``.

    A falsy ``required`` must be SGLang's default, because the advice is then to remove the setting.
    """
    return f"set {setting_of(field)} to {required!r}" if required else f"remove {setting_of(field)}"


def load_all() -> None:
    """Load SGLang's plugins in this process. Raises ``SystemExit`` if an enabled plugin is not in place afterwards.

    SGLang skips entry points that are not registered or not allowed by ``SGLANG_PLUGINS`` and ``SGLANG_PLATFORM``. If
    an entry point raises an exception, SGLang logs it and continues without the plugin.
    """
    from sglang.srt.plugins import load_plugins

    load_plugins()
    if missing := [name for name in _enabled_names() if name not in _loaded]:
        raise SystemExit(
            f"slime_like plugin not loaded: {', '.join(missing)} of {PLUGINS_VARIABLE}: the entry points of setup.py are not "
            f"registered in {sys.prefix}, or failed with an error that the log has above; run `bash scripts/setup.sh`, and unset "
            "SGLANG_PLUGINS and SGLANG_PLATFORM"
        )


def run_worker(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Load the plugins and register the rendezvous scheme in an SGLang worker process, then call its main function ``run``.

    In a forked worker, the plugins are already loaded, and loading them again has no effect. Raises ``SystemExit`` as
    ``load_all`` does.
    """
    load_all()
    from slime_like.distributed.rendezvous import register_scheme  # imports torch

    register_scheme()
    return run(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class Hook:
    """A ``function`` that runs around, after or instead of ``target``, the dotted path of an SGLang function or method."""

    target: str
    kind: Literal["around", "after", "replace"]
    function: Callable[..., Any]


def problem(hook: Hook) -> str | None:
    """Return the reason why ``hook`` is not in place; None if it is."""
    try:
        wrapper = _resolve(hook.target)
    except (ImportError, AttributeError) as error:
        return _import_problem(hook.target, error)
    if _contains(wrapper, hook.function):
        return None
    return f"{hook.target} is not wrapped by {hook.function.__module__}.{hook.function.__qualname__}"


def _contains(wrapper: Any, function: Callable[..., Any], original: object = None) -> bool:
    """Search the chain of wrappers from ``wrapper`` to ``original``; return True if one of them is or calls ``function``.

    ``original`` itself is not searched. Without ``original``, the whole chain is searched.
    """
    while wrapper is not None and wrapper is not original:
        cells = getattr(wrapper, "__closure__", None) or ()
        if wrapper is function or any(cell.cell_contents is function for cell in cells):
            return True
        wrapper = getattr(wrapper, "__wrapped__", None)
    return False


def install(owner: str, hooks: Sequence[Hook]) -> None:
    """Apply ``hooks`` in this process.

    Raises a ``SystemExit`` that names each hook that did not take effect, or the one of ``_search_by_name``.

    The error is a ``SystemExit``, because SGLang catches ``Exception`` around plugins and would serve without the hook.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    registry: Any = HookRegistry
    # SGLang applies the hooks of a target only once, so earlier hooks are set aside while later ones are put on top.
    earlier = {hook.target: registry._hooks.pop(hook.target) for hook in hooks if hook.target in registry._patched}
    registry._patched.difference_update(earlier)
    for hook in hooks:
        registry.register(hook.target, hook.function, HookType[hook.kind.upper()])
    with _search_by_name(owner, hooks):
        registry.apply_hooks()
    for target, applied in earlier.items():
        registry._hooks[target][:0] = applied
    stop_on(owner, [text for hook in hooks if (text := problem(hook))])


@contextmanager
def _search_by_name(owner: str, hooks: Sequence[Hook]) -> Generator[None]:
    """Context manager in which SGLang uses ``replace_imported`` to find the modules that imported a target of ``hooks``.

    SGLang's own search compares each value of each module with the function or method, which takes 0.7 s for the hooks
    of an engine. It remains in use for the hooks of other packages, whose functions a module may import under another
    name. Raises ``SystemExit`` if SGLang lacks this search. Remove when SGLang searches by name.
    """
    from sglang.srt.plugins import hook_registry

    search: Callable[..., int] = resolve_target(owner, f"{hook_registry.__name__}.{SEARCH}")

    def replace(original: object, wrapped: object, source: object) -> int:
        by_name = any(_contains(wrapped, hook.function, original) for hook in hooks)
        return (replace_imported if by_name else search)(original, wrapped, source)

    setattr(hook_registry, SEARCH, replace)
    try:
        yield
    finally:
        setattr(hook_registry, SEARCH, search)


def replace_imported(original: object, wrapped: object, source: object) -> int:
    """Replace function ``original`` of module ``source`` by ``wrapped`` in the modules that imported it under its name.

    ``source`` itself must already have ``wrapped`` under that name. Return the number of names replaced; a module that rejects
    the assignment is skipped. Do nothing if ``source`` is a class, because methods are not imported. ``tests/upstream``
    checks that no module imports a hooked function under another name.
    """
    if isinstance(source, type):
        return 0
    names = [name for name, value in vars(source).items() if value is wrapped]
    values: list[Any] = list(sys.modules.values())  # any object may be in sys.modules
    modules = [module for module in values if isinstance(module, ModuleType)]
    importers = [(module, name) for module in modules for name in names if vars(module).get(name) is original]
    for module, name in importers:
        with suppress(AttributeError, TypeError):  # as SGLang does, which would otherwise apply the hook again
            setattr(module, name, wrapped)
    return sum(vars(module).get(name) is wrapped for module, name in importers)


def through_loaders(reason: str) -> Callable[..., Any]:
    """Return a hook around ``WeightUpdater.update_weights_from_tensor``.

    The hook rejects formats that bypass the model's loaders. In its error message, ``reason`` follows the format.
    """

    def load_tensors(
        original: Callable[..., Any], updater: Any, named_tensors: Any, load_format: str | None = None
    ) -> Any:
        if load_format not in (None, "flattened_bucket"):
            return False, f"load_format={load_format!r} {reason}; use the default or flattened_bucket"
        return original(updater, named_tensors, load_format)

    return load_tensors


def stop_on(owner: str, problems: Sequence[str]) -> None:
    """Raise ``SystemExit``, which stops the engine, naming each of ``problems``. Do nothing if there are none."""
    if problems:
        raise _misfit(owner, problems)


def resolve_target(owner: str, target: str) -> Any:
    """Return the object at the dotted path ``target``.

    Raises ``SystemExit`` if it does not exist or its module cannot be imported.
    """
    try:
        return _resolve(target)
    except (ImportError, AttributeError) as error:
        raise _misfit(owner, [_import_problem(target, error)]) from error


def replace_target(owner: str, target: str, value: Any) -> None:
    """Set the attribute at the dotted path ``target`` in this process.

    Raises the ``SystemExit`` of ``resolve_target``, because setting a name that upstream renamed would have no effect.
    """
    wrap_target(owner, target, lambda original: value)


def wrap_target(owner: str, target: str, wrap: Callable[[Any], Any]) -> None:
    """Set the attribute at the dotted path ``target`` in this process to ``wrap`` of the original.

    Raises the ``SystemExit`` of ``resolve_target``.
    """
    original = resolve_target(owner, target)
    parent, _, name = target.rpartition(".")
    setattr(resolve_target(owner, parent), name, wrap(original))


def _resolve(target: str) -> Any:
    """Return the object at the dotted path ``target``.

    Raises ``AttributeError`` or ``ModuleNotFoundError`` if it does not exist, ``ImportError`` if its module cannot be
    imported. ``pkgutil.resolve_name`` would report a module that cannot be imported as a missing attribute.
    """
    module, _, path = target.partition(".")
    value = importlib.import_module(module)
    while path:
        name, _, remaining_path = path.partition(".")
        try:
            value = importlib.import_module(f"{module}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{module}.{name}":  # a dependency of the module is missing
                raise
            return operator.attrgetter(path)(value)
        module, path = f"{module}.{name}", remaining_path
    return value


def _import_problem(target: str, error: ImportError | AttributeError) -> str:
    no_package = isinstance(error, ModuleNotFoundError) and target.startswith(f"{error.name}.")
    reason = "does not exist" if no_package or isinstance(error, AttributeError) else "cannot be imported"
    return f"{target} {reason} ({error})"


def _misfit(owner: str, problems: Sequence[str]) -> SystemExit:
    return SystemExit(
        f"slime_like plugin {owner!r} does not fit this SGLang: {'; '.join(problems)}. "
        f"Install the SGLang version that setup.py names, or remove {owner!r} from {PLUGINS_VARIABLE}."
    )
