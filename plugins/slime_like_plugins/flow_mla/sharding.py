"""Sharded weights of a model's decoder layers, and loaders that write loaded and pushed weights to this rank's part.

A layer is sharded as soon as it has been built, so a rank never holds the full weights of all layers. While the model loads, the
weights of all layers are views of one slot; the slots for forwards are allocated later. SGLang's loaders write through these
views: before a write, this rank's part of the old values is copied into the slot, and after the write it is copied back. Elements
that a loader does not write, such as other parts of a fused projection, therefore keep their values.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slime_like.config.schema.flow_mla import MODULES, FlowOptions
from slime_like_plugins.flow_mla.absorbed import SOURCE, absorbed_weights
from slime_like_plugins.flow_mla.gather import Gather
from slime_like_plugins.flow_mla.layout import FlowBytes, LayerLayout, Matrix, flow_bytes, layer_layout, matrix
from slime_like_plugins.flow_mla.pipeline import GatherPipeline
from slime_like_plugins.sglang_hooks import HELD_PART

type Loader = Callable[..., Any]
SCALES = "weight_scale_inv"
"""Attribute of a module with FP8 weights: a scale for each block."""
UNREADABLE = (
    "the weights of an engine with FlowMLA cannot be read, checked or saved: a rank holds a part of the attention weights, and "
    "SGLang would read weights of other layers from a slot; set rollout.flow_mla.enabled=false"
)


@dataclass(frozen=True, slots=True)
class ModuleWeight:
    """A weight of a module: a parameter, or a tensor that SGLang computes from one."""

    name: str  # name of the module within its decoder layer, and of the attribute
    module: torch.nn.Module
    attribute: str

    def set(self, view: Tensor, part: Tensor) -> None:
        """Set the weight to ``view``, and its attribute ``HELD_PART`` to this rank's ``part``."""
        weight = getattr(self.module, self.attribute)
        if isinstance(weight, torch.nn.Parameter):
            weight.data = view
        else:
            weight = view
            setattr(self.module, self.attribute, view)
        setattr(weight, HELD_PART, part)


@dataclass(frozen=True, slots=True)
class ShardedLayer:
    """One layer: its weights in the order of the layout, and this rank's part."""

    module: torch.nn.Module
    layout: LayerLayout
    weights: tuple[ModuleWeight, ...]
    part: Tensor


class ShardedWeights:
    """The sharded weights of a model on one rank."""

    def __init__(self, settings: FlowOptions, rank: int, num_ranks: int, gather: Gather) -> None:
        """Start without layers; ``add`` adds them.

        ``rank`` is this rank's index among the ``num_ranks`` ranks that hold the parts of a matrix.
        """
        self._settings, self._rank, self.num_ranks, self._gather = settings, rank, num_ranks, gather
        self._names = tuple(name for key in settings.weights for name in MODULES[key])
        self.layers: list[ShardedLayer] = []
        self.peak_bytes = 0  # largest size so far of the sharded weights and a layer being built
        self.is_loaded = False
        self._pipeline: GatherPipeline | None = None
        self._lock = threading.Lock()  # SGLang's loaders write from several threads

    @property
    def pipeline(self) -> GatherPipeline:
        """Slots and gathers of the layers. ``bind`` must have been called."""
        assert self._pipeline is not None, "bind has not been called"
        return self._pipeline

    def add(self, layer: torch.nn.Module) -> None:
        """Shard the selected weights of a decoder layer before they are loaded. A layer without any is unchanged.

        Raises ``SystemExit`` if a selected weight cannot be sharded.
        """
        selected = list(self._selected(layer))
        if not selected:
            return
        weights, matrices = [weight for weight, _ in selected], [item for _, item in selected]
        layout = layer_layout(matrices, self.num_ranks)
        self._record_peak(selected)
        parameters: dict[int, Any] = {
            position: getattr(w.module, w.attribute)
            for position, w in enumerate(weights)
            if w.attribute in ("weight", SCALES)
        }
        device = parameters[0].device
        index = len(self.layers)
        for position, parameter in parameters.items():
            # In SGLang's parameter types for quantised weights, weight_loader is a property.
            name = "_weight_loader" if hasattr(parameter, "_weight_loader") else "weight_loader"
            setattr(parameter, name, self._writing(index, position, parameter.weight_loader))
            parameter.data = torch.empty(1, dtype=parameter.dtype, device=device).expand(parameter.shape)
        part = self._gather.allocate(layout.part_bytes, device)
        self.layers.append(ShardedLayer(layer, layout, tuple(weights), part))
        vars(layer)["_weight_export_error"] = UNREADABLE  # SGLang then refuses to read or save weights
        layer.register_forward_pre_hook(lambda module, arguments: self._before(index))
        # A hook of the layer, not of its attention: a rank without tokens may skip the attention, and would not gather.
        layer.register_forward_hook(lambda module, arguments, output: self.pipeline.advance(index))

    def bind(self) -> None:
        """Let the other ranks read this rank's parts, and allocate one slot for all layers. Collective.

        Every weight is a view of the slot until ``finish_loading``. Raises ``SystemExit`` if the ranks cannot share their parts.
        """
        layouts, parts = [layer.layout for layer in self.layers], [layer.part for layer in self.layers]
        self._gather.share(parts)
        self._pipeline = GatherPipeline(layouts, 1, self._gather, parts[0].device)
        self._set_views()
        self.peak_bytes = max(self.peak_bytes, self.held_bytes())

    def finish_loading(self) -> FlowBytes:
        """Allocate the slots for forwards, after all weights have been loaded. Return the expected bytes of this rank.

        All ranks call it. Slots never move afterwards, so that CUDA graphs may be captured.
        """
        self.pipeline.grow(self._settings.prefetch_distance)
        self._set_views()
        self.is_loaded = True
        return flow_bytes([layer.layout for layer in self.layers], self._settings.prefetch_distance)

    def update(self, layer: torch.nn.Module, compute: Callable[[], None]) -> None:
        """Call ``compute``, which reads and writes weights of ``layer``, while its slot holds the whole layer.

        This rank's part is updated afterwards. All ranks call it.
        """
        index = next(index for index, sharded in enumerate(self.layers) if sharded.module is layer)
        with self._lock:
            self.pipeline.drain()
            self.pipeline.fetch(index)
            compute()
            self.layers[index].part.copy_(self._slot_part(index))

    def layer_of(self, module: torch.nn.Module) -> torch.nn.Module | None:
        """Return the decoder layer of a module with sharded weights; None if none of its weights are sharded."""
        owners = (layer.module for layer in self.layers if any(weight.module is module for weight in layer.weights))
        return next(owners, None)

    def key_problems(self) -> list[str]:
        """Return an error message for each entry of ``rollout.flow_mla.weights`` that names no weight of the model."""
        names = {name for layer in self.layers for weight in layer.weights for name in weight.name.split(".")}
        unknown_keys = [key for key in self._settings.weights if not names.intersection(MODULES[key])]
        return [
            f"rollout.flow_mla.weights (--flow-mla-weights) has {key}, which the model's attention does not have: remove {key}"
            for key in unknown_keys
        ]

    def slot_problems(self) -> list[str]:
        """Return an error message for each weight that is no longer a view of its slot, because SGLang replaced its memory."""
        problems: list[str] = []
        for index, layer in enumerate(self.layers):
            buffer = self.pipeline.slot(index).buffer
            for position, weight in enumerate(layer.weights):
                address = getattr(weight.module, weight.attribute).data_ptr()
                if address != layer.layout.view(buffer, position).data_ptr():
                    problems.append(f"sharded layer {index}: {weight.name} is not in its slot")
        return problems

    def aliases(self) -> list[str]:
        """Return an error message for each tensor of a sharded layer that lies in the slot of another layer.

        Such a tensor is still a view of the slot that all layers used while loading.
        """
        slots = self.pipeline.slots
        return [
            f"sharded layer {index}: {name} of {type(module).__name__} is in the slot of another layer"
            for index, layer in enumerate(self.layers)
            for module in layer.module.modules()
            for name, tensor in (
                *vars(module).items(),
                *module.named_parameters(recurse=False),
                *module.named_buffers(recurse=False),
            )
            if isinstance(tensor, Tensor)
            and any(
                slot is not self.pipeline.slot(index) and _address(slot.buffer) == _address(tensor) for slot in slots
            )
        ]

    def held_bytes(self) -> int:
        """Return the bytes of this rank's parts and slots in memory."""
        buffers = [layer.part for layer in self.layers] + [slot.buffer for slot in self.pipeline.slots]
        return sum(buffer.untyped_storage().nbytes() for buffer in buffers)

    def _selected(self, layer: torch.nn.Module) -> Iterator[tuple[ModuleWeight, Matrix]]:
        for name, module in layer.named_modules():
            if name.rpartition(".")[2] not in self._names:
                continue
            if reason := module_obstacle(name, module):
                raise SystemExit(f"slime_like plugin 'flow_mla': {name} {reason}")
            yield ModuleWeight(f"{name}.weight", module, "weight"), matrix(module.get_parameter("weight"))
            if (scales := getattr(module, SCALES, None)) is not None:
                yield ModuleWeight(f"{name}.{SCALES}", module, SCALES), matrix(scales)
            owner = layer.get_submodule(name.rpartition(".")[0])
            for attribute, item in absorbed_weights(owner, module):
                yield ModuleWeight(f"{name}.{attribute}", owner, attribute), item

    def _set_views(self) -> None:
        """Make every weight a view of its slot."""
        for index, layer in enumerate(self.layers):
            buffer = self.pipeline.slot(index).buffer
            for position, weight in enumerate(layer.weights):
                weight.set(layer.layout.view(buffer, position), layer.layout.part_of(layer.part, self._rank, position))

    def _record_peak(self, selected: Sequence[tuple[ModuleWeight, Matrix]]) -> None:
        """Update ``peak_bytes`` with the memory held at present.

        This is the memory of the earlier layers' parts and of this layer's full ``selected`` weights.
        """
        weights = (getattr(weight.module, weight.attribute) for weight, _ in selected)
        tensors = [*(layer.part for layer in self.layers), *(weight for weight in weights if weight is not None)]
        self.peak_bytes = max(self.peak_bytes, sum(tensor.untyped_storage().nbytes() for tensor in tensors))

    def _before(self, layer: int) -> None:
        if layer == 0:
            self.pipeline.begin()
        self.pipeline.wait(layer)

    def _writing(self, layer: int, position: int, load: Loader) -> Loader:
        """Wrap ``load``, a parameter's loader, so that it also writes to this rank's part."""

        def write(parameter: torch.nn.Parameter, *args: Any, **kwargs: Any) -> Any:
            sharded = self.layers[layer]
            part = sharded.layout.part_of(sharded.part, self._rank, position)
            with self._lock:
                self.pipeline.drain()
                staged = sharded.layout.part_of(self._slot_part(layer), self._rank, position)
                staged.copy_(part)
                result = load(parameter, *args, **kwargs)
                part.copy_(staged)
            return result

        return write

    def _slot_part(self, layer: int) -> Tensor:
        """Return the section of a layer's slot that holds this rank's part."""
        size = self.layers[layer].layout.part_bytes
        return self.pipeline.slot(layer).buffer[self._rank * size : (self._rank + 1) * size]


def _address(tensor: Tensor) -> int:
    """Return the address of a tensor's storage."""
    return tensor.untyped_storage().data_ptr()


def module_obstacle(name: str, module: torch.nn.Module) -> str | None:
    """Return the reason why the weights of a module, called ``name`` in its layer, cannot be sharded; None if they can."""
    weight: Any = getattr(module, "weight", None)
    if not isinstance(weight, torch.nn.Parameter) or not hasattr(weight, "weight_loader"):
        return "is not a plain linear layer, which FlowMLA requires"
    if getattr(module, SCALES, None) is None:
        is_plain = type(weight) is torch.nn.Parameter and weight.is_floating_point() and weight.dtype.itemsize > 1
        return None if is_plain else "has quantised weights; FlowMLA supports FP8 with a scale for each block"
    if weight.dtype != torch.float8_e4m3fn or getattr(module, SCALES).dtype != torch.float32:
        return f"has {weight.dtype} weights with {getattr(module, SCALES).dtype} scales; FlowMLA supports float8_e4m3fn with float32"
    if name.endswith(SOURCE):
        return (
            "has FP8 weights, from which SGLang computes weights of a different type: remove kv_b_proj from "
            "rollout.flow_mla.weights"
        )
    return None
