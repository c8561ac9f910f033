"""Installation and removal of the wrapper around this process's collectives, and its uses: phases, releases and metrics."""

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

_patches: TorchPatches | None = None
_watchdog: Watchdog | None = None


def install(
    spec: GuardSpec, device: torch.device, rank: int, source: MemorySource | None = None, *, in_c: bool = True
) -> Wrapper | None:
    """Wrap the collectives of this process according to ``spec``; return the wrapper, or None if ``spec.wrap`` is False.

    An earlier wrapper is removed first. Call this before the process's first collective. A watchdog thread ends the process if
    a collective does not end in time (``Watchdog``). ``source`` replaces the memory source in tests. ``in_c=False``: the hot
    path is in Python, as on a machine without a compiler.

    Raises ``CollectiveError`` if removing the earlier wrapper would leave groups that refuse every op, ``SlimeLikeError`` if
    ``folder`` of ``spec`` is not a private folder of this user, and ``OSError`` if no file can be created there.
    """
    global _patches, _watchdog
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
        wrapper = Wrapper(spec, ring, guard, explain, name=name)
        native = NativeHooks.attach(module, ring) if in_c and (module := load()) is not None else None
        if symmetric_actions is not None and native is not None:
            symmetric_actions.watch_with(native.ring)
        _patches = TorchPatches(wrapper, Profile() if spec.profile is not None else None, native)
        _patches.install()
        _watchdog = Watchdog(wrapper, spec.deadline_s * deadline.scale())
    return current()


def _recording_source(spec: GuardSpec, device: torch.device, ring: Ring) -> MemorySource:
    """Return a memory source that records its readings in ``ring``, queried once so that the ring has one from the start."""
    source = RecordingMemorySource(make_source(spec.memory, device), ring)
    source.free()
    source.process_bytes()
    return source


def remove() -> None:
    """Restore torch's methods and functions, and remove the files in shared memory.

    Raises ``CollectiveError`` if a group with releasable communicators exists, because the group would then refuse every op.
    """
    _remove(replaced=False)


def _remove(*, replaced: bool) -> None:
    """Remove the wrapper. ``replaced``: the caller installs another one, which takes over the groups with releasable backends.

    Raises ``CollectiveError`` as ``reload.check_removable`` does.
    """
    global _patches, _watchdog
    reload.check_removable(current(), replaced=replaced)
    if _watchdog is not None:
        _watchdog.stop()
    if _patches is not None:
        _patches.restore()
        _patches.wrapper.close()
    _patches = _watchdog = None


def current() -> Wrapper | None:
    """Return the wrapper of this process, if there is one."""
    return None if _patches is None else _patches.wrapper


@contextlib.contextmanager
def phase(name: str) -> Generator[None]:
    """Assign the collectives of the block to a phase of the run, such as step, push or save.

    Communicators that were released are rebuilt first. If there are any, every rank must enter the block, and
    ``CollectiveError`` is raised if one does not.
    """
    wrapper = current()
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
        if wrapper is current():
            wrapper.set_phase(outer)


def release() -> None:
    """Destroy the releasable communicators if ``guard.release`` is set; the next ``phase`` rebuilds them.

    Every rank must call this function. Raises ``CollectiveError`` as ``reload.release`` does.
    """
    if (wrapper := current()) is not None and wrapper.spec.release:
        reload.release(wrapper)


def label_group(name: str, label: str) -> None:
    """Set the label of a group whose other ranks are outside this world. Call this before the group's first op."""
    if (wrapper := current()) is not None:
        wrapper.labels[name] = label


def drain() -> list[Metric]:
    """Return the metrics ``comm/...`` and ``guard/...`` of this rank since the last drain.

    If ``guard.profile`` is set, also write all measurements so far to the folder ``profile`` of the spec.
    """
    if _patches is None:
        return []
    wrapper, profile = _patches.wrapper, _patches.profile
    metrics = list(counters.metrics(wrapper.counters(), wrapper.guard.min_free))
    wrapper.guard.min_free = None
    if profile is not None and wrapper.spec.profile is not None:
        profile.write(wrapper, Path(wrapper.spec.profile), wrapper.name)
    if wrapper.spec.release:
        metrics.append(Max("guard/reload_time", wrapper.reload_ns / 1e9))
        wrapper.reload_ns = 0
    return metrics
