"""Installation and removal of the wrapper of this process, and the calls that use it: phases, releases and metrics."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from pathlib import Path

import torch

from slime_like.config.schema.guard_policy import GuardSpec
from slime_like.distributed.forensics.ring import Ring, sweep
from slime_like.distributed.guard import counters
from slime_like.distributed.guard.memory import MemorySource, RecordingMemorySource, make_source
from slime_like.distributed.guard.memory_guard import Guard
from slime_like.distributed.guard.symmetric_actions import SymmetricActions
from slime_like.distributed.wrapper import reload
from slime_like.distributed.wrapper.errors import explain
from slime_like.distributed.wrapper.hot import NativeHooks, load
from slime_like.distributed.wrapper.profile import Profile
from slime_like.distributed.wrapper.torch_patches import TorchPatches
from slime_like.distributed.wrapper.watchdog import Watchdog
from slime_like.distributed.wrapper.wrapper import Wrapper
from slime_like.metrics.types import Max, Metric
from slime_like.util import deadline

_current: Wrapper | None = None
_patches: TorchPatches | None = None
_watchdog: Watchdog | None = None


def install(
    spec: GuardSpec, device: torch.device, rank: int, source: MemorySource | None = None, *, in_c: bool = True
) -> Wrapper | None:
    """Wrap the collectives of this process according to ``spec`` and return the wrapper; None if ``spec.wrap`` is
    False.

    An earlier wrapper is replaced. Call this before the process's first collective. ``source`` replaces the memory source in
    tests. ``in_c=False``: the hot path is in Python, as on a machine without a compiler.
    """
    global _current, _patches, _watchdog
    _remove(replaced=spec.wrap and spec.release)
    if spec.wrap:
        folder = None if spec.folder is None else Path(spec.folder)
        sweep(keep=folder)
        name = f"{spec.name}_rank{rank}"
        ring = Ring(folder, name, spec.ring)
        symmetric_actions = (
            SymmetricActions(folder / f"{spec.name}.requests") if spec.symmetric and folder is not None else None
        )
        memory = _recording_source(spec, device, ring) if source is None else RecordingMemorySource(source, ring)
        guard = Guard(memory, symmetric_actions)
        _current = Wrapper(spec, ring, guard, explain)
        _current.name = name
        native = NativeHooks.attach(module, ring) if in_c and (module := load()) is not None else None
        if symmetric_actions is not None and native is not None:
            symmetric_actions.watch_with(native.ring)
        _patches = TorchPatches(_current, Profile() if spec.profile is not None else None, native)
        _patches.install()
        _watchdog = Watchdog(_current, spec.deadline_s * deadline.scale())
    return _current


def _recording_source(spec: GuardSpec, device: torch.device, ring: Ring) -> MemorySource:
    """Return the source of ``spec``, queried once so that the ring contains a reading from the start."""
    source = RecordingMemorySource(make_source(spec.memory, device), ring)
    source.free()
    source.process_bytes()
    return source


def remove() -> None:
    """Restore torch's methods and functions, and remove the files in shared memory.

    Raises ``CollectiveError`` if a group with reloadable communicators exists, because it would refuse every op.
    """
    _remove(replaced=False)


def _remove(*, replaced: bool) -> None:
    """Remove the wrapper. ``replaced``: the caller installs another one, which takes over groups with reloadable communicators."""
    global _current, _patches, _watchdog
    reload.check_removable(_current, replaced=replaced)
    if _watchdog is not None:
        _watchdog.stop()
    if _current is not None:
        if _patches is not None:
            _patches.restore()
        _current.close()
    _current = _patches = _watchdog = None


def current() -> Wrapper | None:
    """Return the wrapper of this process, if there is one."""
    return _current


@contextlib.contextmanager
def phase(name: str) -> Generator[None]:
    """Assign the collectives of the block to a phase of the run, such as step, push or save.

    Rebuilds released communicators first.
    """
    wrapper = _current
    if wrapper is None:
        yield
        return
    outer = wrapper.phase_name
    wrapper.set_phase(name)
    try:
        if wrapper.released:
            reload.rebuild(wrapper)
        yield
    finally:
        if wrapper is _current:
            wrapper.set_phase(outer)


def release() -> None:
    """Destroy all communicators under ``guard.release``; the next ``phase`` rebuilds them.

    A collective: every rank calls it.
    """
    if _current is not None and _current.spec.release:
        reload.release(_current)


def label_group(name: str, label: str) -> None:
    """Set the label of a group whose other ranks are outside this world. Call this before the group's first op."""
    if _current is not None:
        _current.labels[name] = label


def drain() -> list[Metric]:
    """Return the metrics ``comm/...`` and ``guard/...`` of this rank since the last drain."""
    if _current is None:
        return []
    metrics = list(counters.metrics(_current.counters(), _current.guard.min_free))
    _current.guard.min_free = None
    if _patches is not None and _patches.profile is not None and _current.spec.profile is not None:
        _patches.profile.write(_current, Path(_current.spec.profile), _current.name)
    if _current.spec.release:
        metrics.append(Max("guard/reload_time", _current.reload_ns / 1e9))
        _current.reload_ns = 0
    return metrics
