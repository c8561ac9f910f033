"""Wrappers around torch's methods and functions. They are the hot path and therefore call few helper functions.

The functions that create wrappers take torch's method or function (``raw``) and return a wrapper with the same signature.
"""

# torch has no public registry of process groups and backends.
# pyright: reportPrivateUsage=false
from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from threading import get_ident
from time import perf_counter_ns as clock
from typing import Any, cast
from weakref import ref

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from slime_like.config.schema.collectives import Kind, Op
from slime_like.distributed.forensics.ring import ENDED, NO_PEER, RECORD
from slime_like.distributed.wrapper import releasable
from slime_like.distributed.wrapper.wrapper import MAX_PENDING, Wrapper

ANY_PEER = -1
ASYNC_OPTIONS = frozenset(
    kind for name, kind in vars(c10d).items() if name.endswith("Options") and hasattr(kind, "asyncOp")
)
OMITTED: Any = object()  # an omitted argument


def method(w: Wrapper, op: Op, name: str, raw: Callable[..., Any]) -> Callable[..., Any]:
    """Return the wrapper around one method of ``ProcessGroup``."""
    return _point_to_point(w, op, name, raw) if op.kind is Kind.POINT else _collective(w, op, raw)


def _collective(w: Wrapper, op: Op, raw: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method that issues a collective. torch usually passes ``(tensors, opts)`` or ``(outputs, inputs, opts)``."""
    counters, check, torch_wait = w.counters_by_op[op.name], w.guard.check, w.torch_wait
    pack, memory, words, next_record = RECORD.pack_into, w.ring.memory, w.ring.words, w.ring.next_record
    payload = op.payload

    def call(group: Any, a: Any = OMITTED, b: Any = OMITTED, c: Any = OMITTED, *more_args: Any, **kw: Any) -> Any:
        try:
            counter = counters[group]
        except KeyError:
            counter = w.add_counter(op, group)
        counter.calls += 1
        start_ns = clock()
        if start_ns >= counter.check_at and w.composite_thread != get_ident():
            check(counter, start_ns)
            start_ns = clock()
        size = 0
        if payload is not None:
            tensors = b if payload else a
            if tensors.__class__ is list and len(tensors) == 1:
                tensors = tensors[0]
            size = tensors.nbytes if tensors.__class__ is Tensor else size_of(tensors)
            counter.bytes += size
        index, offset, end = next_record()
        pack(memory, offset, index, start_ns, 0, size, counter.code, counter.next_sequence(), NO_PEER)
        try:
            if more_args or kw or b is OMITTED:
                opts, work = _issue(raw, counter.target, (a, b, c, *more_args), kw)
            elif c is OMITTED:
                opts, work = b, raw(counter.target, a, b)
            else:
                opts, work = c, raw(counter.target, a, b, c)
            if work is not None:
                if opts.asyncOp if opts.__class__ in ASYNC_OPTIONS else getattr(opts, "asyncOp", True):
                    return w.add_pending(work, counter, index, start_ns)
                torch_wait(work)
        except BaseException as error:  # noqa: BLE001 (fault boundary: any error ends the op and is raised again)
            explained_error = w.record_failure(counter, index, error)
            raise explained_error from explained_error.__cause__
        words[end] = end_ns = clock()
        counter.ns += end_ns - start_ns
        return None  # tells torch that the op has ended

    return call


def _issue(raw: Callable[..., Any], target: Any, args: Sequence[Any], kw: dict[str, Any]) -> tuple[Any, Any]:
    """Issue an op called with keyword or unusual arguments, such as ``barrier(opts=...)``; return its options and work."""
    if args[0] is OMITTED:
        return kw.get("opts"), raw(target, **kw)
    present = [x for x in args if x is not OMITTED]
    return kw.get("opts", present[-1] if present else None), raw(target, *present, **kw)


def _point_to_point(w: Wrapper, op: Op, name: str, raw: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a send, a receive, or ``_end_coalescing``, which ends a batch of ops. Number sends and receives per peer."""
    counters, check, pending = w.counters_by_op[op.name], w.guard.check, w.pending_works
    pack, memory, words, next_record = RECORD.pack_into, w.ring.memory, w.ring.words, w.ring.next_record
    has_payload, any_source = op.payload is not None, name == "recv_anysource"

    def call(group: Any, a: Any = OMITTED, b: Any = OMITTED, c: Any = OMITTED, *more_args: Any, **kw: Any) -> Any:
        try:
            counter = counters[group]
        except KeyError:
            counter = w.add_counter(op, group)
        counter.calls += 1
        start_ns = clock()
        if start_ns >= counter.check_at and w.composite_thread != get_ident():
            check(counter, start_ns)
            start_ns = clock()
        size, peer = 0, NO_PEER
        if has_payload:
            tensors = a[0] if a.__class__ is list and len(a) == 1 else a
            size = tensors.nbytes if tensors.__class__ is Tensor else size_of(tensors)
            counter.bytes += size
            peer = ANY_PEER if any_source else b
        try:
            sequence = counter.peers[peer]()
        except KeyError:
            sequence = counter.add_peer(peer)
        index, offset, end = next_record()
        pack(memory, offset, index, start_ns, 0, size, counter.code, sequence, peer)
        try:
            if more_args or kw or c is OMITTED:
                work = raw(counter.target, *[x for x in (a, b, c, *more_args) if x is not OMITTED], **kw)
            else:
                work = raw(counter.target, a, b, c)
        except BaseException as error:  # noqa: BLE001 (fault boundary: any error ends the op and is raised again)
            explained_error = w.record_failure(counter, index, error)
            raise explained_error from explained_error.__cause__
        if work is None:
            words[end] = clock()
        elif id(work) in pending or len(pending) > MAX_PENDING:
            return w.add_pending(work, counter, index, start_ns)
        else:
            pending[id(work)] = (ref(work), counter, index)
        counter.ns += clock() - start_ns
        return work

    return call


def wait(w: Wrapper, raw: Callable[..., Any]) -> Callable[..., Any]:
    """Return the wrapper around ``Work.wait`` that records the end of asynchronous ops."""
    pop, words = w.pending_works.pop, w.ring.words
    first_word, mask, width = w.ring.first_word(0), w.ring.slots - 1, RECORD.size // 8

    def call(work: Any, *args: Any, **kwargs: Any) -> Any:
        pending = pop(id(work), None)
        if pending is None or pending[0]() is not work:
            return raw(work, *args, **kwargs)
        _, counter, index = pending
        start_ns = clock()
        try:
            result = raw(work, *args, **kwargs)
        except BaseException as error:  # noqa: BLE001 (fault boundary: any error ends the op and is raised again)
            explained_error = w.record_failure(counter, index, error)
            raise explained_error from explained_error.__cause__
        end_ns = clock()
        counter.ns += end_ns - start_ns
        start = first_word + (index & mask) * width
        if words[start] == index:  # else a later op has overwritten the record
            words[start + ENDED] = end_ns
        return result

    return call


def composite(w: Wrapper, op: Op, raw: Callable[..., Any]) -> Callable[..., Any]:
    """Return the wrapper around a function that issues several ops.

    The function is counted and guarded as one op; the ops that it issues are only counted.
    """
    position = group_position(raw)

    @functools.wraps(raw)
    def call(*args: Any, **kwargs: Any) -> Any:
        group = group_of(position, args, kwargs)
        is_removed = not w.is_installed  # the caller bound this function before the wrapper was removed
        if is_removed or not isinstance(group, dist.ProcessGroup) or group not in c10d._world.pg_map:
            return raw(*args, **kwargs)
        counter = w.counters_by_op[op.name].get(group) or w.add_counter(op, group)
        counter.calls += 1
        start_ns = clock()
        if start_ns >= counter.check_at and w.composite_thread != get_ident():
            w.guard.check(counter, start_ns)
            start_ns = clock()
        index, offset, _ = w.ring.next_record()
        RECORD.pack_into(w.ring.memory, offset, index, start_ns, 0, 0, counter.code, counter.calls, NO_PEER)
        with w.in_composite(counter, index, start_ns):
            return raw(*args, **kwargs)

    return call


def group_position(raw: Callable[..., Any]) -> int | None:
    """Return the position of the parameter ``group`` of a torch.distributed function; None for ``batch_isend_irecv``."""
    parameters = list(inspect.signature(raw).parameters)
    return parameters.index("group") if "group" in parameters else None


def group_of(position: int | None, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the group, given or default, of a call of a torch.distributed function. ``position``: from ``group_position``."""
    if position is None:  # batch_isend_irecv: all ops of a batch have one group
        batch = args[0] if args else kwargs["p2p_op_list"]
        group = batch[0].group if batch else None
    else:
        group = kwargs.get("group", args[position] if position < len(args) else None)
    return c10d._get_default_group() if group is None else group


def redirect(raw: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method that is not an op, so that it is called on ``releasable.target(group)``, which executes its ops."""

    def call(group: Any, *args: Any, **kwargs: Any) -> Any:
        return raw(releasable.target(group), *args, **kwargs)

    return call


def destroy(w: Wrapper, raw: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``destroy_process_group``, so that the counters and releasable backends of destroyed groups are dropped."""

    @functools.wraps(raw)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return raw(*args, **kwargs)
        finally:
            for group in [group for group in w.groups if group not in c10d._world.pg_map]:
                w.drop_group(group)
            releasable.drop_destroyed_groups()

    return call


def size_of(value: object) -> int:
    """Return the bytes of a tensor, or of all tensors in nested lists or tuples; 0 for other values."""
    if isinstance(value, (list, tuple)):
        return sum(size_of(item) for item in cast("Sequence[object]", value))
    return int(value.nbytes) if isinstance(value, Tensor) else 0
