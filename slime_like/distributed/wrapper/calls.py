"""What stands in the place of torch's methods and functions: the hot path, of plain statements, each worth its time.

Each maker returns a function with the signature of what it replaces.
"""

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
PURGE_AT = 1024  # outstanding works: those that were dropped are looked for
SAY = frozenset(kind for name, kind in vars(c10d).items() if name.endswith("Options") and hasattr(kind, "asyncOp"))
NONE: Any = object()  # an argument that was not given


def method(w: Wrapper, op: Op, name: str, raw: Callable[..., Any]) -> Callable[..., Any]:
    """The wrapper round one method of ``ProcessGroup``."""
    return _point(w, op, name, raw) if op.kind is Kind.POINT else _collective(w, op, raw)


def _collective(w: Wrapper, op: Op, raw: Callable[..., Any]) -> Callable[..., Any]:
    """Ops of all ranks of a group. torch gives ``ops, opts`` or ``out, in, opts``; whatever else comes is passed on."""
    table, check, await_ = w.tables[op.name], w.guard.check, w.await_
    pack, memory, words, take, payload = RECORD.pack_into, w.ring.memory, w.ring.words, w.ring.take, op.payload

    def call(group: Any, a: Any = NONE, b: Any = NONE, c: Any = NONE, *rest: Any, **kw: Any) -> Any:
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
            given = b if payload else a
            if given.__class__ is list and len(given) == 1:
                given = given[0]
            size = given.nbytes if given.__class__ is Tensor else size_of(given)
            counter.bytes += size
        index, offset, end = take()
        pack(memory, offset, index, started, 0, size, counter.code, counter.next(), NO_PEER)
        try:
            if rest or kw or b is NONE:
                opts, work = _issue(raw, counter.target, (a, b, c, *rest), kw)
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
        return None  # torch takes it for a backend that has waited itself

    return call


def _issue(raw: Callable[..., Any], target: Any, args: Sequence[Any], kw: dict[str, Any]) -> tuple[Any, Any]:
    """Options and work of a call with any arguments, as ``barrier(opts=...)``."""
    if args[0] is NONE:
        return kw.get("opts"), raw(target, **kw)
    given = [x for x in args if x is not NONE]
    return kw.get("opts", given[-1] if given else None), raw(target, *given, **kw)


def _point(w: Wrapper, op: Op, name: str, raw: Callable[..., Any]) -> Callable[..., Any]:
    """Sends, receives, and batches of them: asynchronous, numbered for each peer."""
    table, check, carries, anyone = w.tables[op.name], w.guard.check, op.payload is not None, name == "recv_anysource"
    pack, memory, words, take, loose = RECORD.pack_into, w.ring.memory, w.ring.words, w.ring.take, w.loose

    def call(group: Any, a: Any = NONE, b: Any = NONE, c: Any = NONE, *rest: Any, **kw: Any) -> Any:
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
            given = a[0] if a.__class__ is list and len(a) == 1 else a
            size = given.nbytes if given.__class__ is Tensor else size_of(given)
            counter.bytes += size
            peer = ANY_PEER if anyone else b
        try:
            sequence = counter.peers[peer]()
        except KeyError:
            sequence = counter.meet(peer)
        index, offset, end = take()
        pack(memory, offset, index, started, 0, size, counter.code, sequence, peer)
        try:
            if rest or kw or c is NONE:
                work = raw(counter.target, *[x for x in (a, b, c, *rest) if x is not NONE], **kw)
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
    """The wrapper round ``GroupTask.wait``: where asynchronous ops end, and where most of them fail."""
    pop, words, base, mask, width = w.loose.pop, w.ring.words, w.ring.place(0), w.ring.slots - 1, RECORD.size // 8

    def call(work: Any, *args: Any, **kwargs: Any) -> Any:
        found = pop(id(work), None)
        if found is None or found[0]() is not work:
            return raw(work, *args, **kwargs)
        _, counter, index = found
        started = clock()
        try:
            done = raw(work, *args, **kwargs)
        except BaseException as error:  # noqa: BLE001 (fault boundary: whatever it is ends the op, and goes on)
            failed = w.failed(counter, index, error)
            raise failed from failed.__cause__
        ended = clock()
        counter.ns += ended - started
        place = base + (index & mask) * width
        if words[place] == index:  # else its place is taken by a later one
            words[place + ENDED] = ended
        return done

    return call


def composite(w: Wrapper, op: Op, raw: Callable[..., Any]) -> Callable[..., Any]:
    """The wrapper round a function made of several ops: counted and guarded as one; the ops inside are counted too."""
    place = group_place(raw)

    @functools.wraps(raw)
    def call(*args: Any, **kwargs: Any) -> Any:
        group = group_of(place, args, kwargs)
        removed = not w.placed  # a name that was bound meanwhile
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
    """Which argument of a function of torch.distributed is the group; None: a batch of ops that have one each."""
    parameters = list(inspect.signature(raw).parameters)
    return parameters.index("group") if "group" in parameters else None


def group_of(place: int | None, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The group of a call of such a function; ``place`` is from ``group_place``."""
    if place is None:  # batch_isend_irecv: all of a batch have one group
        batch = args[0] if args else kwargs["p2p_op_list"]
        group = batch[0].group if batch else None
    else:
        group = kwargs.get("group", args[place] if place < len(args) else None)
    return c10d._get_default_group() if group is None else group


def redirected(raw: Callable[..., Any]) -> Callable[..., Any]:
    """A method that is no op, of whatever carries out the ops of its group."""

    def call(group: Any, *args: Any, **kwargs: Any) -> Any:
        return raw(reload.target(group), *args, **kwargs)

    return call


def destroy(w: Wrapper, raw: Callable[..., Any]) -> Callable[..., Any]:
    """``destroy_process_group``, after which no counter holds on to a group."""

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
    """Bytes of a tensor, or of all in nested lists."""
    if isinstance(value, (list, tuple)):
        return sum(size_of(item) for item in cast("Sequence[object]", value))
    return int(value.nbytes) if isinstance(value, Tensor) else 0
