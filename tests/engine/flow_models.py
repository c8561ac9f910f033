"""Decoder layers with the names and shapes of SGLang's attention modules, and ranks as threads with gloo groups."""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from slime_like_plugins.flow_mla.gather import Gather, GroupGather
from slime_like_plugins.flow_mla.host_parts import HostParts
from slime_like_plugins.flow_mla.pull import PullGather

HIDDEN, HEADS, DIM = 48, 4, 12
QUERY_LATENT, LATENT, ROPE = 24, 16, 8
KINDS = ("mla", "gqa", "mqa", "hybrid")
WEIGHTS = {
    "mla": ("o_proj", "q_proj", "kv_b_proj", "a_proj"),
    "gqa": ("o_proj", "qkv_proj"),
    "mqa": ("qkv_proj",),
    "hybrid": ("o_proj", "qkv_proj"),
}


class Linear(nn.Module):
    """Linear layer whose weight loader writes a range of rows, like the loaders of fused projections."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs), requires_grad=False)
        vars(self.weight)["weight_loader"] = self.load

    @staticmethod
    def load(parameter: nn.Parameter, new_rows: Tensor, first_row: int = 0) -> None:
        parameter.data[first_row : first_row + len(new_rows)].copy_(new_rows)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class GroupedAttention(nn.Module):
    """Causal attention with ``kv_heads`` heads of keys and values."""

    def __init__(self, kv_heads: int) -> None:
        super().__init__()
        self.widths = [HEADS * DIM, kv_heads * DIM, kv_heads * DIM]
        self.qkv_proj, self.o_proj = Linear(sum(self.widths), HIDDEN), Linear(HIDDEN, HEADS * DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, DIM)).transpose(0, 1) for part in self.qkv_proj(x).split(self.widths, -1))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(0, 1).flatten(1))


class AbsorbedAttention(nn.Module):
    """Absorbed attention over latents."""

    qk_nope_head_dim = v_head_dim = DIM

    def __init__(self) -> None:
        super().__init__()
        self.fused_qkv_a_proj_with_mqa = Linear(QUERY_LATENT + LATENT + ROPE, HIDDEN)
        self.q_b_proj = Linear(HEADS * (DIM + ROPE), QUERY_LATENT)
        self.kv_b_proj = Linear(HEADS * 2 * DIM, LATENT)
        self.o_proj = Linear(HIDDEN, HEADS * DIM)
        self.w_kc: Tensor | None = None
        self.w_vc: Tensor | None = None

    def absorb(self) -> None:
        """Compute ``w_kc`` and ``w_vc`` as SGLang does, in place if they exist."""
        keys, values = self.kv_b_proj.weight.unflatten(0, (HEADS, 2 * DIM)).split(DIM, 1)
        for name, value in (
            ("w_kc", keys.transpose(1, 2).contiguous().transpose(1, 2)),
            ("w_vc", values.contiguous().transpose(1, 2)),
        ):
            old = getattr(self, name)
            assert old is None or (old.shape, old.stride()) == (value.shape, value.stride())
            setattr(self, name, value if old is None else old.copy_(value))

    def forward(self, x: Tensor) -> Tensor:
        assert self.w_kc is not None and self.w_vc is not None
        q_latent, latent, rope = self.fused_qkv_a_proj_with_mqa(x).split([QUERY_LATENT, LATENT, ROPE], -1)
        q, q_rope = self.q_b_proj(q_latent).unflatten(-1, (HEADS, -1)).transpose(0, 1).split([DIM, ROPE], -1)
        query, key = torch.cat([q @ self.w_kc, q_rope], -1), torch.cat([latent, rope], -1)
        out = F.scaled_dot_product_attention(
            query, key.expand(HEADS, -1, -1), latent.expand(HEADS, -1, -1), is_causal=True
        )
        return self.o_proj((out @ self.w_vc).transpose(0, 1).flatten(1))


class Mixer(nn.Module):
    """A token mixer without attention, whose weights no setting selects."""

    def __init__(self) -> None:
        super().__init__()
        self.in_proj, self.out_proj = Linear(HIDDEN, HIDDEN), Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.out_proj(torch.cumsum(self.in_proj(x), 0))


class FlowLayer(nn.Module):
    """A decoder layer. Without tokens, it does not run its attention."""

    def __init__(self, kind: str, index: int) -> None:
        super().__init__()
        self.self_attn: nn.Module = (
            AbsorbedAttention()
            if kind == "mla"
            else Mixer()
            if kind == "hybrid" and index % 4 != 3
            else GroupedAttention(1 if kind == "mqa" else 2)
        )
        self.mlp = Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 0:
            return x
        x = F.rms_norm(x + self.self_attn(x), (HIDDEN,))
        return F.rms_norm(x + self.mlp(x), (HIDDEN,))


def tensors(layers: Sequence[FlowLayer], seed: int) -> list[tuple[int, str, int, Tensor]]:
    """Return (index of the layer, name of the module, first row, rows) of new weights.

    The second parts of fused projections come last.
    """
    generator = torch.Generator().manual_seed(seed)
    parts: list[tuple[int, str, int, Tensor]] = []
    for index, layer in enumerate(layers):
        for name, module in layer.named_modules():
            if isinstance(module, Linear):
                weight = 0.3 * torch.randn(module.weight.shape, generator=generator)
                split = len(weight) // 3 if name.endswith(("qkv_proj", "with_mqa")) else len(weight)
                parts += [(index, name, 0, weight[:split]), (index, name, split, weight[split:])]
    return sorted((part for part in parts if len(part[3])), key=lambda part: part[2] > 0)


def load(
    layers: Sequence[FlowLayer],
    weights: Iterable[tuple[int, str, int, Tensor]],
    update: Callable[[Any, Callable[[], None]], None],
) -> None:
    """Load weights as SGLang does: call the loaders, then compute the absorbed weights within ``update``."""
    absorbed: set[int] = set()
    for index, name, row, rows in weights:
        weight: Any = layers[index].get_submodule(name).weight
        weight.weight_loader(weight, rows, row)
        if name.endswith("kv_b_proj"):
            absorbed.add(index)
    for index in sorted(absorbed):
        attention = layers[index].self_attn
        assert isinstance(attention, AbsorbedAttention)
        update(layers[index], attention.absorb)


@functools.cache
def freeze_imports() -> None:
    """Exclude the objects that exist at the first call from later collections, which scan SGLang's for 0.2 s otherwise."""
    gc.freeze()


class GlooRanks:
    """Gloo groups, one for each slot, of ranks that are threads of this process."""

    def __init__(self, size: int, num_slots: int) -> None:
        gc.collect()  # closes the descriptors of earlier ranks, two for each weight
        freeze_imports()
        self.size, self._num_slots, self._store = size, num_slots, dist.HashStore()
        self._groups: dict[int, list[Any]] = {}
        self.run(self._connect)

    def _connect(self, rank: int) -> None:
        stores = [dist.PrefixStore(str(slot), self._store) for slot in range(self._num_slots)]
        self._groups[rank] = [dist.ProcessGroupGloo(store, rank, self.size, timedelta(seconds=30)) for store in stores]

    def gather(self, rank: int, transport: str = "collective") -> Gather:
        """Return the gather of one rank."""
        if transport == "p2p":
            return PullGather(rank, self.size, RankMessages(self._groups[rank][0]), HostParts(self._num_slots))
        return RankGather(self._groups[rank])

    def run[T](self, work: Callable[[int], T]) -> list[T]:
        """Return the results of ``work`` in rank order, or raise the first error of a rank."""
        results: dict[int, T] = {}
        errors: list[BaseException] = []

        def enter(rank: int) -> None:
            try:
                with torch.no_grad():
                    results[rank] = work(rank)
            except BaseException as error:  # noqa: BLE001 (raised in the caller)
                errors.append(error)

        threads = [threading.Thread(target=enter, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        if errors:
            raise errors[0]
        return [results[rank] for rank in range(self.size)]


class RankGather(GroupGather):
    """FlowMLA's gather without torch's global registry of groups."""

    def _broadcast(self, group: Any, tensor: Tensor, rank: int) -> Any:
        return group.broadcast(tensor, rank)


class RankMessages:
    """FlowMLA's exchange of messages without torch's global registry of groups."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def gather(self, message: bytes) -> list[bytes]:
        text = torch.zeros(1 << 16, dtype=torch.uint8)
        text[: len(message)] = torch.tensor([*message], dtype=torch.uint8)
        texts = [[torch.empty_like(text) for _ in range(self._group.size())]]
        self._group.allgather(texts, [text]).wait()
        return [bytes(encoded_text.tolist()).rstrip(b"\0") for encoded_text in texts[0]]

    def barrier(self) -> None:
        self._group.barrier().wait()
