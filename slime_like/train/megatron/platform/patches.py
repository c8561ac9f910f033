"""Patches that megatron-core 0.19.2 needs on CPU and GPU, some of them only without TransformerEngine (and apex).

``host`` runs each patch right after its module's body, before another module can bind the old name. Remove a patch when
upstream has fixed the fault that its docstring describes.
"""

from __future__ import annotations

import importlib.util
import queue
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from slime_like.train.megatron.platform.adamw import GroupStepAdamW

Patch = Callable[[ModuleType], None]


STOCK: dict[tuple[str, str], Any] = {}  # (module or class, name) -> the original object that a patch has replaced


def replace(target: Any, name: str, value: Any) -> None:
    """Set ``target.name`` and keep the original in ``STOCK``. Raises ``AssertionError`` if the name does not exist."""
    owner = str(getattr(target, "__name__", repr(target)))
    assert hasattr(target, name), f"{owner} has no {name!r}: megatron-core changed, review slime_like.train.megatron"
    STOCK[owner, name] = getattr(target, name)
    setattr(target, name, value)


def _optimizer(module: ModuleType) -> None:
    replace(module, "Adam", GroupStepAdamW)
    replace(module, "USING_PYTORCH_OPTIMIZER", False)


def _gradient_norm(module: ModuleType) -> None:
    """Compute the norm of all gradients on the device: upstream reads the norm of each parameter on the host.

    Remove when upstream's replacement for ``multi_tensor_l2norm`` does not wait for the device.
    """

    def l2_norm(chunk_size: int, overflow: Any, tensor_lists: Any, per_tensor: bool, *args: Any) -> tuple[Tensor, None]:
        norms = torch._foreach_norm([t for tensors in tensor_lists for t in tensors])  # pyright: ignore[reportPrivateUsage]  torch.nn.utils uses it for norms
        return torch.linalg.vector_norm(torch.stack(norms).float()).view(1), None

    replace(module, "local_multi_tensor_l2_norm", l2_norm)


def _distributed_optimizer(module: ModuleType) -> None:
    _order_group_by_dtype(module)
    _detach_float32_shards(module)
    replace(module, "Adam", GroupStepAdamW)
    replace(module, "HAVE_APEX_OR_TE", True)
    replace(module, "USING_APEX_OPTIMIZER", True)


def _order_group_by_dtype(module: ModuleType) -> None:
    """Number the parameters of a group in storage order, with 32-bit parameters before 16-bit parameters.

    Upstream stores parameters in this order but numbers them in another, so after a resume, a parameter would get the optimizer
    state of a different parameter.
    Remove when upstream numbers parameters in storage order.
    """
    optimizer = module.DistributedOptimizer
    stock = optimizer._build_optimizer_group_ranges.__func__

    def build(cls: Any, *args: Any) -> tuple[dict[Any, tuple[int, int]], list[dict[str, Any]]]:
        index, ranges = stock(cls, *args)
        for group, group_range in enumerate(ranges):
            group_range["params"].sort(key=lambda p: p.dtype != torch.float32)
            index.update({p: (group, position) for position, p in enumerate(group_range["params"])})
        return index, ranges

    replace(optimizer, "_build_optimizer_group_ranges", classmethod(build))


def _detach_float32_shards(module: ModuleType) -> None:
    """Detach the shards of float32 parameters, as upstream does for 16-bit ones: an offloaded optimizer requires leaf tensors.

    Remove when upstream detaches them.
    """
    optimizer = module.DistributedOptimizer
    stock = optimizer._build_model_and_main_param_groups.__func__

    def build(cls: Any, gbuf_ranges: Any, param_gbuf_map: Any, opt_group_ranges: Any, *args: Any) -> Any:
        groups = stock(cls, gbuf_ranges, param_gbuf_map, opt_group_ranges, *args)
        shards: dict[int, Tensor] = {}
        for group in groups[3]:
            for index, shard in enumerate(group):
                group[index] = shards[id(shard)] = shard.detach()
                group[index].__dict__.update(shard.__dict__)
        for group_range in opt_group_ranges:
            original = group_range["orig_group"]
            original["params"] = [shards.get(id(p), p) for p in original["params"]]
        return groups

    replace(optimizer, "_build_model_and_main_param_groups", classmethod(build))


def _share_storage(target: Tensor, source: Tensor) -> None:
    """Resize ``target``'s storage to the size of ``source``'s, and copy the bytes, which all views of ``target`` then show.

    autograd's version counter is unchanged.
    """
    target.untyped_storage().resize_(source.untyped_storage().nbytes())
    target.untyped_storage().copy_(source.untyped_storage())


def _recompute(module: ModuleType) -> None:
    """Keep selective recompute from compiling a C++ extension and, if fp8 is off, from reading TransformerEngine's fp8 state."""
    stock = module.CheckpointWithoutOutput.__init__

    def init(self: Any, fp8: Any = None) -> None:
        stock(self, fp8 or None)  # upstream tests `fp8 is not None`, but callers pass False

    replace(module.CheckpointWithoutOutput, "__init__", init)
    replace(module, "_get_share_storage", lambda: _share_storage)


def _optimizer_offload(module: ModuleType) -> None:
    """Fix three faults of optimizer offload: the GPU part's step count after a resume, ``dummy_step``, and float32 parameters.

    Sub-optimizers copy their param groups from the hybrid optimizer before each step but do not write them back, so the
    per-group count of ``GroupStepAdamW`` would be reset to the resumed value at every step. ``dummy_step``, which allocates
    the state before it is loaded, changes the weights by a step with random gradients. After a resume, upstream looks up a main
    weight for every parameter, but float32 parameters have none.
    """
    hybrid = module.HybridDeviceOptimizer
    sync, dummy_step = hybrid._sync_sub_optimizers_state_to_hdo, hybrid.dummy_step

    def sync_counts(self: Any) -> None:
        sync(self)
        groups = self.gpu_optimizer.param_groups if self.gpu_optimizer else []
        for group in self.param_groups if groups else ():
            group["step"] = max(g.get("step", 0) for g in groups)

    def dummy_step_without_update(self: Any) -> None:
        weights = [(p, p.detach().clone()) for group in self.param_groups for p in group["params"]]
        dummy_step(self)
        for p, value in weights:
            p.data.copy_(value)
        self.update_fp32_param_by_new_param()

    replace(hybrid, "_sync_sub_optimizers_state_to_hdo", sync_counts)

    def set_main_weights(self: Any) -> None:
        for p, state in self.state.items() if self.param_update_in_fp32 else ():
            self.param_to_inner_param[p].data.copy_(state["master_param"])

    replace(hybrid, "dummy_step", dummy_step_without_update)
    replace(hybrid, "_update_fp32_params_by_new_state", set_main_weights)


_save_errors: ContextVar[list[Exception] | None] = ContextVar("save errors", default=None)


@contextmanager
def save_errors() -> Generator[list[Exception]]:
    """Yield a list that collects this thread's errors in writing a checkpoint.

    When a rank fails to write its part, upstream keeps only the class of the error. If rank 0 raised its error in writing
    metadata, the other ranks would wait in a broadcast from rank 0.
    """
    errors: list[Exception] = []
    token = _save_errors.set(errors)
    try:
        yield errors
    finally:
        _save_errors.reset(token)


def _collect_errors(write: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``write``, a function of rank 0: its ``OSError`` goes to the list of ``save_errors`` or, without a list, is raised."""

    def write_collecting_errors(*args: Any, **kwargs: Any) -> None:
        try:
            write(*args, **kwargs)
        except OSError as error:
            if (errors := _save_errors.get()) is None:
                raise
            errors.append(error)

    return write_collecting_errors


def _checkpoint_writer(module: ModuleType) -> None:
    """Pass a save's results through a plain queue, and add its errors to the list of ``save_errors``.

    Upstream's queue spawns a Manager process that imports __main__. After a failed write, upstream's frame and the error refer
    to each other and keep the written ``BytesIO.getbuffer()`` alive. Before Python 3.12.2, the garbage collector crashes on
    such a cycle at the next save (gh-111049), so the error is kept without its traceback.
    """

    def get_write_results_queue(mp_mode: str = "spawn") -> queue.Queue[Any]:
        return queue.Queue()  # one per save, because a failed save leaves results in its queue

    stock: Callable[..., tuple[int, Any]] = module.FileSystemWriterAsync.write_preloaded_data

    def write_preloaded_data(*args: Any, **kwargs: Any) -> tuple[int, Any]:
        worker, outcome = stock(*args, **kwargs)
        if isinstance(outcome, Exception):
            # If closing the file failed too, the context is the first error, which has a traceback of its own.
            outcome.__traceback__ = outcome.__context__ = outcome.__cause__ = None
            if (errors := _save_errors.get()) is not None:
                errors.append(outcome)
        return worker, outcome

    replace(module, "get_write_results_queue", get_write_results_queue)
    replace(module.FileSystemWriterAsync, "write_preloaded_data", staticmethod(write_preloaded_data))
    replace(module.FileSystemWriterAsync, "finish", _collect_errors(module.FileSystemWriterAsync.finish))


def _checkpoint_config(module: ModuleType) -> None:
    replace(module, "save_config", _collect_errors(module.save_config))


def _checkpoint_reader(module: ModuleType) -> None:
    """Read metadata and objects of a checkpoint with an allow list (``pickles``): upstream unpickles them without restriction.

    Remove when torch reads ``.metadata`` and the objects in ``.distcp`` files with an allow list.
    """
    from slime_like.train.megatron.platform import pickles  # imports torch.distributed.checkpoint, as ``module`` does

    replace(module, "_get_filesystem_reader", lambda checkpoint_dir, **_: pickles.CheckedReader(checkpoint_dir))


def _checkpoint_common(module: ModuleType) -> None:
    """Read ``common.pt`` with an allow list: upstream uses torch's default, which an environment variable can change."""
    from slime_like.train.megatron.platform import pickles

    replace(module, "load_common", pickles.load_common)


def _pipeline_shapes(module: ModuleType) -> None:
    """Fix the exchange of shapes between two pipeline ranks with virtual stages.

    Each of the two ranks is both the previous and the next rank of the other. Upstream posts sends and receives of shapes in
    an order that pairs "send to previous" with "receive from previous", which swaps the shapes of activations and gradients.
    Upstream sends the tensors themselves in the right order.
    """
    communicator = module.P2PCommunicator
    stock = communicator._communicate_shapes

    def communicate_shapes(
        self: Any, tensor_send_next: Tensor | None, tensor_send_prev: Tensor | None, recv_prev: bool, recv_next: bool
    ) -> tuple[list[int], list[int]]:
        if self.pp_group.size() != 2:
            return stock(self, tensor_send_next, tensor_send_prev, recv_prev, recv_next)
        device = module.torch.cuda.current_device()

        def shape(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else torch.tensor(tensor.shape, dtype=torch.int64, device=device)

        received = [torch.zeros(3, dtype=torch.int64, device=device) for _ in range(2)]
        send_shapes = shape(tensor_send_prev), shape(tensor_send_next)
        requests = module._p2p_ops(
            tensor_send_prev=send_shapes[0],
            tensor_recv_prev=received[0] if recv_prev else None,
            tensor_send_next=send_shapes[1],
            tensor_recv_next=received[1] if recv_next else None,
            group=self.pp_group,
            prev_pipeline_rank=self.prev_rank,
            next_pipeline_rank=self.next_rank,
        )
        # Do not wait for the sends: the peer may receive them in its next exchange, after the tensors of this exchange.
        for name in requests.keys() & {"recv_prev", "recv_next"}:
            requests[name].wait()
        self.shapes_in_flight = [
            *getattr(self, "shapes_in_flight", [])[-8:],
            (requests, send_shapes),
        ]  # keeps the buffers alive
        return received[0].tolist(), received[1].tolist()

    replace(communicator, "_communicate_shapes", communicate_shapes)


def _gated_delta_net(module: ModuleType) -> None:
    """Allow a Gated DeltaNet without fla (flash-linear-attention): upstream raises even if a subclass has its own kernels.

    Remove when megatron-core checks for fla only where it is called.
    """
    replace(module, "HAVE_FLA", True)


def table() -> dict[str, Patch]:
    """Return the patches by module name, without those that an installed TransformerEngine or apex makes unnecessary."""
    patches: dict[str, Patch] = {
        "megatron.core.dist_checkpointing.strategies.filesystem_async": _checkpoint_writer,
        "megatron.core.dist_checkpointing.serialization": _checkpoint_config,
        "megatron.core.dist_checkpointing.strategies.common": _checkpoint_common,
        "megatron.core.dist_checkpointing.strategies.torch": _checkpoint_reader,
        "megatron.core.pipeline_parallel.p2p_communication": _pipeline_shapes,
        "megatron.core.ssm.gated_delta_net.common": _gated_delta_net,
        "megatron.core.optimizer.distrib_optimizer": _order_group_by_dtype,
    }
    if importlib.util.find_spec("transformer_engine") is None:
        patches["megatron.core.tensor_parallel.random"] = _recompute
        if importlib.util.find_spec("apex") is None:
            patches["megatron.core.utils"] = _gradient_norm
            patches["megatron.core.optimizer"] = _optimizer
            patches["megatron.core.optimizer.distrib_optimizer"] = _distributed_optimizer
            patches["megatron.core.optimizer.cpu_offloading.hybrid_optimizer"] = _optimizer_offload
    return patches
