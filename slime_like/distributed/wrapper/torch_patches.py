"""Replacement of torch's methods and functions by wrappers.

All functions of ``torch.distributed`` except functional collectives issue their op through a method of ``ProcessGroup``. These
methods are replaced on the class, so each op is counted exactly once, even if its caller imported the function before
``install`` or calls a method of the group directly. Functional collectives reach a group in C++, where the wrappers cannot
see them.
Composite functions, which issue several ops (``broadcast_object_list``), are replaced as well, and are counted and guarded
under their own name, unless the caller imported the function before ``install``.

Remove when torch's hooks (``ProcessGroup.register_pre_hook``, ``register_post_hook``) report every op and its failure.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from slime_like.config.schema.collectives import OPS, Kind, Op
from slime_like.distributed.guard.counters import counter_type
from slime_like.distributed.wrapper import op_wrappers, releasable
from slime_like.distributed.wrapper.hot import NativeHooks
from slime_like.distributed.wrapper.profile import Profile
from slime_like.distributed.wrapper.wrapper import Wrapper


@dataclass(slots=True)
class TorchPatches:
    """Replacement of torch's methods and functions, from ``install`` to ``restore``."""

    wrapper: Wrapper
    profile: Profile | None = None  # measures every op
    native: NativeHooks | None = None  # the hot path in C; None: it is in Python
    _originals: list[tuple[Any, str, Any]] = field(default_factory=list[tuple[Any, str, Any]])
    _creators: list[tuple[str, Any]] = field(default_factory=list[tuple[str, Any]])  # argument of releasable.restore

    def install(self) -> None:
        """Replace torch's methods, composite functions and ``destroy_process_group`` by their wrappers.

        With ``guard.release``, also make torch create new groups with releasable backends.
        """
        w = self.wrapper
        w.set_phase("start")
        w.is_installed = True
        if self.native is not None:
            module = self.native.module
            w.native_ring = self.native.ring
            w.counter_class, w.make_sequence = counter_type(module.HotCounterFields), module.SequenceCounter
            w.pending_works = module.Works()
        for op in OPS:
            w.counters_by_op[op.name] = {}
            for name in op.methods:
                self._replace(dist.ProcessGroup, name, functools.partial(self._wrap_method, op, name))
            for name in op.functions if op.kind is Kind.COMPOSITE else ():
                self._replace_function(name, functools.partial(self._wrap_composite, op))
        if w.spec.release:
            for name in releasable.REDIRECTED:
                self._replace(dist.ProcessGroup, name, op_wrappers.redirect)
            self._creators = releasable.install_releasable_backends()
        self._replace(c10d.Work, "wait", self._wrap_wait)
        self._replace_function("destroy_process_group", functools.partial(op_wrappers.destroy, w))

    def _wrap_method(self, op: Op, name: str, raw: Callable[..., Any]) -> Callable[..., Any]:
        call = op_wrappers.method(self.wrapper, op, name, raw)
        if self.native is not None:
            call = self.native.method(self.wrapper, op, name, raw, call)
        return call if self.profile is None else self.profile.wrap_method(self.wrapper, op, call)

    def _wrap_composite(self, op: Op, raw: Callable[..., Any]) -> Callable[..., Any]:
        call = op_wrappers.composite(self.wrapper, op, raw)
        if self.native is not None:
            call = self.native.composite(self.wrapper, op, raw, call)
        return call if self.profile is None else self.profile.wrap_composite(self.wrapper, op, raw, call)

    def _wrap_wait(self, raw: Callable[..., Any]) -> Callable[..., Any]:
        call = op_wrappers.wait(self.wrapper, raw)
        return call if self.native is None else self.native.wait(self.wrapper, raw, call)

    def restore(self) -> None:
        """Undo ``install``."""
        self.wrapper.is_installed = False
        for owner, name, original in reversed(self._originals):
            setattr(owner, name, original)
        self._originals.clear()
        releasable.restore(self._creators)

    def _replace(self, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        assert name in vars(owner), f"torch has no {owner.__name__}.{name}: review slime_like.config.schema.collectives"
        self._originals.append((owner, name, vars(owner)[name]))
        setattr(owner, name, wrap(getattr(owner, name)))

    def _replace_function(self, name: str, wrap: Callable[[Any], Any]) -> None:
        """Replace a function in ``distributed_c10d`` and in ``torch.distributed``, which re-exports it."""
        original = getattr(c10d, name)
        assert getattr(dist, name) is original, f"torch.distributed.{name} is no longer that of distributed_c10d"
        wrapped_function = wrap(original)
        for module in (dist, c10d):
            self._originals.append((module, name, original))
            setattr(module, name, wrapped_function)
