"""The hot path in C (``csrc/hot.c``), compiled once per machine and user if there is a compiler.

Each ``Call`` of the extension replaces one method or function: it handles the usual calls and passes all others to the
equivalent Python function (``wrapper.op_wrappers``). Remove when torch offers hooks that are as cheap.
"""

# torch has no public registry of process groups and backends.
# pyright: reportPrivateUsage=false
from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import inspect
import logging
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from slime_like.config.schema.collectives import Kind, Op
from slime_like.distributed.forensics.ring import HEAD, Ring
from slime_like.distributed.wrapper import op_wrappers
from slime_like.distributed.wrapper.wrapper import MAX_PENDING, Wrapper
from slime_like.util.c_build import BuildError, Recipe, build

SOURCE = Path(__file__).parent / "csrc" / "hot.c"
NAME = "_hot"


def recipe() -> Recipe:
    """Return the build recipe of the extension for this interpreter."""
    include = f"-I{sysconfig.get_path('include')}"
    interpreter = f"-DINTERPRETER={sys.hexversion:#x}"  # makes the file name depend on the interpreter
    return Recipe(
        SOURCE, ("-O2", "-std=gnu11", "-fPIC", "-shared", "-w", include, interpreter), description="hot path's source"
    )


@functools.cache
def load() -> Any:
    """Return the extension, or None with a logged reason if it cannot be compiled or imported."""
    try:
        path = str(build(recipe()).path)
        loader = importlib.machinery.ExtensionFileLoader(NAME, path)
        spec = importlib.util.spec_from_file_location(NAME, path, loader=loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except (BuildError, ImportError, OSError) as error:
        logging.getLogger(__name__).warning("collectives are counted in Python, about 1 us more for each: %s", error)
        return None
    return module


@dataclass(frozen=True, slots=True)
class NativeHooks:
    """The extension, bound to one ring: creates the replacements of torch's methods and functions."""

    module: Any
    ring: Any

    @classmethod
    def attach(cls, module: Any, ring: Ring) -> NativeHooks:
        """Bind the extension ``module`` to ``ring``.

        From now on, the extension also chooses the record in the ring for each op that the Python wrappers handle.
        """
        native_ring = module.Ring(ring.memory, HEAD, ring.slots)
        ring.next_record, ring.before_close = native_ring.next_record, native_ring.close
        return cls(module, native_ring)

    def method(self, w: Wrapper, op: Op, name: str, raw: Callable[..., Any], fallback: Callable[..., Any]) -> Any:
        """Return the replacement for a method of ``ProcessGroup``; ``fallback`` is the wrapper in Python."""
        kind = self.module.POINT if op.kind is Kind.POINT else self.module.COLLECTIVE
        payload = -1 if op.payload is None else op.payload
        return self._call(w, kind, raw, fallback, w.counters_by_op[op.name], payload, name == "recv_anysource")

    def wait(self, w: Wrapper, raw: Callable[..., Any], fallback: Callable[..., Any]) -> Any:
        """Return the replacement for ``Work.wait``."""
        return self._call(w, self.module.WAIT, raw, fallback)

    def composite(self, w: Wrapper, op: Op, raw: Callable[..., Any], fallback: Callable[..., Any]) -> Any:
        """Return the replacement for a function that issues several ops."""
        position = op_wrappers.group_position(raw)
        call = self._call(
            w, self.module.COMPOSITE, raw, fallback, w.counters_by_op[op.name], -1 if position is None else position
        )
        return functools.update_wrapper(call, raw)

    def _call(
        self,
        w: Wrapper,
        kind: int,
        raw: Callable[..., Any],
        fallback: Callable[..., Any],
        counters: dict[Any, Any] | None = None,
        payload: int = -1,
        any_source: bool = False,
    ) -> Any:
        return self.module.Call(
            kind=kind,
            fallback=fallback,
            raw=raw,
            counters={} if counters is None else counters,
            ring=self.ring,
            works=w.pending_works,
            wait=w.torch_wait,
            record_failure=w.record_failure,
            add_pending=w.add_pending,
            size_of=op_wrappers.size_of,
            world=c10d._world,
            tensor=Tensor,
            nbytes=inspect.getattr_static(Tensor, "nbytes"),
            counter_class=w.counter_class,
            payload=payload,
            any_source=any_source,
            max_pending=MAX_PENDING,
        )
