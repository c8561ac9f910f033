"""Backend ``fla``: flash-linear-attention's Triton kernels, the default on a GPU.

Create ``FlaGDN`` only after ``select`` has validated the machine: the constructor imports fla-core and triton.
"""

from __future__ import annotations

import os
from importlib import import_module, metadata
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slime_like.config.schema.gdn import GDNConfig
from slime_like.errors import ConfigError
from slime_like_plugins.qwen_gdn.backend import RangeRule
from slime_like_plugins.qwen_gdn.packing import num_tokens, padded, zero_of

FLASH_QLA_SWITCH = "FLA_FLASH_QLA"  # read by fla at every call


class FlaGDN:
    """``chunk_gated_delta_rule`` and ``causal_conv1d`` of fla-core, without dispatch to FlashQLA.

    fla dispatches each call to any installed package that accepts it. With flash-qla installed, it would dispatch to FlashQLA
    on Hopper and Blackwell, so the constructor sets the environment variable FLA_FLASH_QLA to 0 in this process. It raises
    ``ConfigError`` if fla would still dispatch the rule to another package, or if fla's dispatch tables have moved.
    """

    name = "fla"

    def __init__(self, config: GDNConfig | None = None) -> None:
        del config
        os.environ[FLASH_QLA_SWITCH] = "0"
        self._rule: Any = import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
        self._conv: Any = import_module("fla.modules.causal_conv1d").causal_conv1d
        self._build_cp_context: Any = import_module("fla.ops.cp").build_cp_context
        if (dispatched := active_dispatch("gated_delta_rule")) is not None:
            raise ConfigError(
                f"model.gdn.backend=fla, but fla would dispatch its calls to {dispatched}: unset the variables FLA_* that enable it"
            )

    def chunk_rule(  # noqa: PLR0913
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        *,
        cu_seqlens: Tensor,
        cu_seqlens_cpu: Tensor,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Apply the rule as ``backend.GDNBackend.chunk_rule`` describes."""
        rows, tokens = q.shape[1], num_tokens(cu_seqlens_cpu, q.shape[1])
        if not tokens:
            states = (len(cu_seqlens) - 1, v.shape[2], q.shape[3], v.shape[3])
            final = v.new_zeros(states, dtype=torch.float32) if initial_state is None else initial_state.float()
            zero = zero_of(q, k, v, g, beta, initial_state)
            return torch.zeros_like(v) + zero, final + zero if output_final_state else None
        out, final = self._rule(
            *(
                part[:, :tokens].contiguous() for part in (q, k, v, g, beta)
            ),  # the layer's tensors are slices of wider rows
            initial_state=initial_state,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=cu_seqlens,
            **self._options(cu_seqlens_cpu),
        )
        return padded(out, rows), final

    def _options(self, cu_seqlens_cpu: Tensor) -> dict[str, Any]:
        """Return the keyword arguments of ``_rule`` that differ between fla and FlashQLA."""
        return {"cu_seqlens_cpu": cu_seqlens_cpu}

    def causal_conv(
        self,
        x: Tensor,
        weight: Tensor,
        *,
        cu_seqlens: Tensor,
        cu_seqlens_cpu: Tensor,
        activation: str | None = "silu",
        halo: Tensor | None = None,
    ) -> Tensor:
        """Convolve as ``backend.GDNBackend.causal_conv`` describes."""
        rows, tokens = x.shape[1], num_tokens(cu_seqlens_cpu, x.shape[1])
        if not tokens:
            return torch.zeros_like(x) + zero_of(x, weight, halo)
        out, _ = self._conv(
            x[:, :tokens],
            weight,
            activation=activation,
            backend="triton",
            # [N, W-1, D] -> [N, D, W]; no window reads the first column
            initial_state=None if halo is None else F.pad(halo.transpose(1, 2), (1, 0)).to(x.dtype),
            cu_seqlens=cu_seqlens,
            cu_seqlens_cpu=cu_seqlens_cpu,
        )
        return padded(out, rows)

    def range_rule(self, cu_seqlens: Tensor, cu_seqlens_cpu: Tensor, group: Any) -> RangeRule | None:
        """Return fla's rule for a stream that is split over the ranks of ``group``.

        The ranks gather states and decays once in forward and once in backward, so the rule is a collective.
        """
        context = self._build_cp_context(cu_seqlens, group, cu_seqlens_cpu=cu_seqlens_cpu)

        def rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
            columns = (part.contiguous() for part in (q, k, v, g, beta))
            return self._rule(*columns, use_qk_l2norm_in_kernel=True, cp_context=context)[0]

        return rule

    def kernels(self) -> str:
        """Return the versions of the kernels, and the functions that fla has dispatched to other packages so far."""
        dispatched = ", ".join(dispatched_functions()) or "none"
        versions = f"fla-core {metadata.version('fla-core')} on triton {metadata.version('triton')}"
        return f"{versions}, dispatched to other packages: {dispatched}"


def active_dispatch(operation: str) -> str | None:
    """Return the name of the backend that fla tries first for ``operation``; None for fla's own Triton kernels."""
    registry = _registries()[operation]
    active = registry.get_active()
    return None if active is None else str(active.backend_type)


def dispatched_functions() -> list[str]:
    """Return the functions that fla has dispatched to another backend in this process: ``operation.function -> backend``."""
    dispatched = {
        entry for registry in _registries().values() for entry in registry._logged if not entry.endswith(":fail")
    }
    return sorted("{}.{} -> {}".format(*entry.split(":")) for entry in dispatched)


def _registries() -> dict[str, Any]:
    """Return fla's dispatch tables by operation. Raises ``ConfigError`` if they have moved.

    Remove when fla reports which kernels ran.
    """
    backends = import_module("fla.backends")
    if not hasattr(backends, "_operation_registries") or not hasattr(backends.BackendRegistry("x"), "_logged"):
        raise ConfigError(
            "fla-core has moved its dispatch tables: install the version of scripts/requirements/gpu.lock"
        )
    return backends._operation_registries
