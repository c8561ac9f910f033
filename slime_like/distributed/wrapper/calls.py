"""Replacements of torch's methods and functions: the hot path, in plain statements to be fast.

Each function here returns a wrapper with the signature of the original.
"""

# torch has no public registry of process groups and backends.
# pyright: reportPrivateUsage=false
from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from threading import get_ident
from time import perf_counter_ns as clock
from typing import TYPE_CHECKING, Any, cast
from weakref import ref

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from slime_like.config.schema.collectives import Kind, Op
from slime_like.distributed.forensics.ring import ENDED, NO_PEER, RECORD
from slime_like.distributed.wrapper import reload

if TYPE_CHECKING:
    from slime_like.distributed.wrapper.wrapper import Wrapper

ANY_PEER = -1
PURGE_AT = 1024  # outstanding works from which dropped ones are removed
SAY = frozenset(kind for name, kind in vars(c10d).items() if name.endswith("Options") and hasattr(kind, "asyncOp"))
NONE: Any = object()  # an omitted argument


def method(w: Wrapper, op: Op, name: str, raw: Callable[..., Any]) -> Callable[..., Any]:
    """Return the wrapper of one method of ``ProcessGroup``."""
    return _point(w, op, name, raw) if op.kind is Kind.POINT else _collective(w, op, raw)


def _collective(w: Wrapper, op: Op, raw: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an op of all ranks of a group. torch passes ``ops, opts`` or ``out, in, opts``; other arguments pass through."""
    table, check, await_ = w.tables[op.name], w.guard.check, w.await_
    pack, memory, words, take, payload = RECORD.pack_into, w.ring.memory, w.ring.words, w.ring.take, op.payload

    def call(group: Any, a: Any = NONE, b: Any = NONE, c: Any = NONE, *more_args: Any, **kw: Any) -> Any:
        try:
            counter = table[group]
        except KeyError:
            counter = w.adopt(op, group)
        counter.calls += 1
        started = clock()
        if started >= counter.due and w.composing != get_ident():
            check(counter, started)
            started = clock()
        size = 0
        if payload is not None:
            tensors = b if payload else a
            if tensors.__class__ is list and len(tensors) == 1:
                tensors = tensors[0]
            size = tensors.nbytes if tensors.__class__ is Tensor else size_of(tensors)
            counter.bytes += size
        index, offset, end = take()
        pack(memory, offset, index, started, 0, size, counter.code, counter.next(), NO_PEER)
        try:
            if more_args or kw or b is NONE:
                opts, work = _issue(raw, counter.target, (a, b, c, *more_args), kw)
            elif c is NONE:
                opts, work = b, raw(counter.target, a, b)
            else:
                opts, work = c, raw(counter.target, a, b, c)
            if work is not None:
                if opts.asyncOp if opts.__class__ in SAY else getattr(opts, "asyncOp", True):
                    return w.outstanding(work, counter, index, started)
                await_(work)
        except BaseException as error:  # noqa: BLE001 (fault boundary: whatever it is ends the op, and goes on)
            failed = w.failed(counter, index, error)
            raise failed from failed.__cause__
        words[end] = ended = clock()
        counter.ns += ended - started
        return None  # for torch: the op has been waited for

    return call


def _issue(raw: Callable[..., Any], target: Any, args: Sequence[Any], kw: dict[str, Any]) -> tuple[Any, Any]:
    """Return options and work of a call with other arguments, as ``barrier(opts=...)``."""
    if args[0] is NONE:
        return kw.get("opts"), raw(target, **kw)
    present = [x for x in args if x is not NONE]
    return kw.get("opts", present[-1] if present else None), raw(target, *present, **kw)


def _point(w: Wrapper, op: Op, name: str, raw: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap sends, receives, and batches of them: asynchronous, numbered per peer."""
    table, check, carries, anyone = w.tables[op.name], w.guard.check, op.payload is not None, name == "recv_anysource"
    pack, memory, words, take, loose = RECORD.pack_into, w.ring.memory, w.ring.words, w.ring.take, w.loose

    def call(group: Any, a: Any = NONE, b: Any = NONE, c: Any = NONE, *more_args: Any, **kw: Any) -> Any:
        try:
            counter = table[group]
        except KeyError:
            counter = w.adopt(op, group)
        counter.calls += 1
        started = clock()
        if started >= counter.due and w.composing != get_ident():
            check(counter, started)
            started = clock()
        size, peer = 0, NO_PEER
        if carries:
            tensors = a[0] if a.__class__ is list and len(a) == 1 else a
            size = tensors.nbytes if tensors.__class__ is Tensor else size_of(tensors)
            counter.bytes += size
            peer = ANY_PEER if anyone else b
        try:
            sequence = counter.peers[peer]()
        except KeyError:
            sequence = counter.meet(peer)
        index, offset, end = take()
        pack(memory, offset, index, started, 0, size, counter.code, sequence, peer)
        try:
            if more_args or kw or c is NONE:
                work = raw(counter.target, *[x for x in (a, b, c, *more_args) if x is not NONE], **kw)
            else:
                work = raw(counter.target, a, b, c)
        except BaseException as error:  # noqa: BLE001 (fault boundary: whatever it is ends the op, and goes on)
            failed = w.failed(counter, index, error)
            raise failed from failed.__cause__
        if work is None:
            words[end] = clock()
        elif id(work) in loose or len(loose) > PURGE_AT:
            return w.outstanding(work, counter, index, started)
        else:
            loose[id(work)] = (ref(work), counter, index)
        counter.ns += clock() - started
        return work

    return call


def wait(w: Wrapper, raw: Callable[..., Any]) -> Callable[..., Any]:
    """Return the wrapper of ``GroupTask.wait``, in which asynchronous ops end and most of them fail."""
    pop, words, base, mask, width = w.loose.pop, w.ring.words, w.ring.place(0), w.ring.slots - 1, RECORD.size // 8

    def call(work: Any, *args: Any, **kwargs: Any) -> Any:
        issued = pop(id(work), None)
        if issued is None or issued[0]() is not work:
            return raw(work, *args, **kwargs)
        _, counter, index = issued
        started = clock()
        try:
            result = raw(work, *args, **kwargs)
        except BaseException as error:  # noqa: BLE001 (fault boundary: whatever it is ends the op, and goes on)
            failed = w.failed(counter, index, error)
            raise failed from failed.__cause__
        ended = clock()
        counter.ns += ended - started
        place = base + (index & mask) * width
        if words[place] == index:  # else overwritten by a later op
            words[place + ENDED] = ended
        return result

    return call


def composite(w: Wrapper, op: Op, raw: Callable[..., Any]) -> Callable[..., Any]:
    """Return the wrapper of a function made of several ops: counted and guarded as one; the ops inside are counted too."""
    place = group_place(raw)

    @functools.wraps(raw)
    def call(*args: Any, **kwargs: Any) -> Any:
        group = group_of(place, args, kwargs)
        removed = not w.placed  # called by a name bound before the wrapper's removal
        if removed or not isinstance(group, dist.ProcessGroup) or group not in c10d._world.pg_map:
            return raw(*args, **kwargs)
        counter = w.tables[op.name].get(group) or w.adopt(op, group)
        counter.calls += 1
        started = clock()
        if started >= counter.due and w.composing != get_ident():
            w.guard.check(counter, started)
            started = clock()
        index, offset, _ = w.ring.take()
        RECORD.pack_into(w.ring.memory, offset, index, started, 0, 0, counter.code, counter.calls, NO_PEER)
        with w.composing_op(counter, index, started):
            return raw(*args, **kwargs)

    return call


def group_place(raw: Callable[..., Any]) -> int | None:
    """Return the position of the argument ``group`` of a torch.distributed function; None for a batch of ops."""
    parameters = list(inspect.signature(raw).parameters)
    return parameters.index("group") if "group" in parameters else None


def group_of(place: int | None, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the group of a call of such a function; ``place`` is from ``group_place``."""
    if place is None:  # batch_isend_irecv: all of a batch have one group
        batch = args[0] if args else kwargs["p2p_op_list"]
        group = batch[0].group if batch else None
    else:
        group = kwargs.get("group", args[place] if place < len(args) else None)
    return c10d._get_default_group() if group is None else group


def redirected(raw: Callable[..., Any]) -> Callable[..., Any]:
    """Redirect a method that is not an op to the group that executes the ops."""

    def call(group: Any, *args: Any, **kwargs: Any) -> Any:
        return raw(reload.target(group), *args, **kwargs)

    return call


def destroy(w: Wrapper, raw: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``destroy_process_group`` to drop the counters of destroyed groups."""

    @functools.wraps(raw)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return raw(*args, **kwargs)
        finally:
            for group in [group for group in w.groups if group not in c10d._world.pg_map]:
                w.forget(group)
            reload.forget()

    return call


def size_of(value: object) -> int:
    """Return the bytes of a tensor, or of all tensors in nested lists."""
    if isinstance(value, (list, tuple)):
        return sum(size_of(item) for item in cast("Sequence[object]", value))
    return int(value.nbytes) if isinstance(value, Tensor) else 0
