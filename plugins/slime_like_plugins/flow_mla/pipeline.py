"""Slots that the layers of a model share, and the gathers that fill them ahead of the forward."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slime_like_plugins.flow_mla.gather import Gather, Pending
from slime_like_plugins.flow_mla.layout import LayerLayout, slot_sizes


class Slot:
    """A buffer for one layer at a time, at an address that never changes."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.layer: int | None = None  # layer in the buffer or in the pending gather; None: no layer
        self.pending: Pending | None = None

    def wait(self) -> None:
        """Wait for the pending gather, if there is one."""
        if self.pending is not None:
            self.pending.wait()
            self.pending = None


class GatherPipeline:
    """Slots of a model and the gathers into them, in the order of its layers.

    Layer ``i`` uses slot ``i % len(slots)``. When a layer ends, the next layer of its slot is gathered; a slot's last layer is
    followed by its first one. A slot therefore gathers only its own layers, for any number of layers. At the end of a forward,
    the slots hold or receive the first layers.
    """

    def __init__(
        self, layouts: Sequence[LayerLayout], num_slots: int, gather: Gather, device: torch.device | None = None
    ) -> None:
        """Create the slots on ``device`` (default: CPU). ``gather`` has this rank's part of each layer."""
        self._layouts, self._gather, self._device = layouts, gather, device or torch.device("cpu")
        self.slots = [Slot(size, self._device) for size in slot_sizes(layouts, num_slots)]

    def grow(self, num_slots: int) -> None:
        """Replace the single slot used for loading with ``num_slots`` slots, or one per layer if there are fewer layers.

        The single slot becomes the largest of them. All ranks call it.
        """
        (loading_slot,) = self.slots
        self.drain()
        sizes = slot_sizes(self._layouts, num_slots)
        largest = sizes.index(max(sizes))
        self.slots = [loading_slot if slot == largest else Slot(size, self._device) for slot, size in enumerate(sizes)]

    def slot(self, layer: int) -> Slot:
        """Return the slot of ``layer``."""
        return self.slots[layer % len(self.slots)]

    def begin(self) -> None:
        """Gather the first layers unless the slots hold them. All ranks call it before each forward.

        On a GPU, the current stream waits for these gathers, because a CUDA graph of the model waits only for gathers that it
        contains.
        """
        missing = [layer for layer, slot in enumerate(self.slots) if slot.layer != layer]
        if missing:
            self._gather.meet()
        for layer in missing:
            self._start(layer)
            if self._device.type == "cuda":
                self.slot(layer).wait()

    def wait(self, layer: int) -> None:
        """Wait until the slot holds ``layer``. Raises ``RuntimeError`` if the forward runs layers in another order."""
        slot = self.slot(layer)
        if slot.layer != layer:
            raise RuntimeError(
                f"FlowMLA: sharded layer {layer} runs while its slot holds layer {slot.layer}: the model does not run its layers in "
                "order, each once; set rollout.flow_mla.enabled=false"
            )
        slot.wait()

    def advance(self, layer: int) -> None:
        """Start gathering the next layer of the slot that holds ``layer``, after the forward has finished ``layer``.

        The last layer of a slot is followed by its first one, for the next forward; a slot with only one layer keeps it. On a
        GPU, the call for the last layer of the model waits for all gathers, because a CUDA graph has to join their streams before
        its capture ends.
        """
        num_layers, following = len(self._layouts), layer + len(self.slots)
        following = following if following < num_layers else layer % len(self.slots)
        if following != layer:
            self._start(following)
        if layer == num_layers - 1 and self._device.type == "cuda":
            for slot in self.slots:
                slot.wait()

    def drain(self) -> None:
        """Wait for all gathers and mark the slots as empty. All ranks call it before the slots or the parts are written."""
        has_weights = any(slot.layer is not None for slot in self.slots)
        for slot in self.slots:
            slot.wait()
            slot.layer = None
        if has_weights:
            self._gather.meet()  # another rank may still read this rank's parts

    def fetch(self, layer: int) -> None:
        """Gather ``layer`` into its slot and wait for it. All ranks call it after ``drain``, and may then write their parts."""
        self._gather.meet()
        self._start(layer)
        self.slot(layer).wait()
        self._gather.meet()

    def _start(self, layer: int) -> None:
        slot, layout = self.slot(layer), self._layouts[layer]
        slot.wait()
        buffer = slot.buffer[: layout.num_bytes]
        slot.layer, slot.pending = layer, self._gather.start(layer % len(self.slots), layer, buffer)
