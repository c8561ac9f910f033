"""Expert weights in the memory of a worker or an engine, and their committed version."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from slime_like_plugins.remote_experts.compute import Ids, Weights, expert_sums
from slime_like_plugins.remote_experts.frames import FrameError
from slime_like_plugins.remote_experts.shapes import ExpertShapes
from slime_like_plugins.sglang_cpu.expert_sums import expert_sums_kernel

MAX_NAMED = 8  # matrices that a report names


class ExpertMemory:
    """Remote experts of one rank of an engine. New weights are NaN until they are written."""

    def __init__(self, shapes: ExpertShapes, device: torch.device) -> None:
        self.shapes = shapes
        if device.type == "cpu":
            expert_sums_kernel()  # compiles the kernel if needed: a later request has less time than the start
        self._layers: dict[int, dict[str, Tensor]] = {}
        for layer, num_experts in zip(shapes.layers, shapes.num_experts, strict=True):
            gate_up = (num_experts, 2 * shapes.intermediate, shapes.hidden)
            down = (num_experts, shapes.hidden, shapes.intermediate)
            self._layers[layer] = {
                name: torch.full(size, float("nan"), dtype=shapes.torch_dtype, device=device)
                for name, size in (("w13", gate_up), ("w2", down))
            }
        self.version = 0  # 0: not committed

    @property
    def matrices(self) -> Mapping[int, Mapping[str, Tensor]]:
        """Matrices of each layer by name."""
        return self._layers

    def begin(self) -> None:
        """Invalidate the weights: every element is NaN until it is written, and the version is 0 until a commit."""
        self.version = 0
        for matrices in self._layers.values():
            for matrix in matrices.values():
                matrix.fill_(float("nan"))

    def rows(self, layer: int, name: str, expert: int, start: int, size: int) -> Tensor:
        """Return ``size`` rows of a matrix as a view. Raises ``FrameError`` if they do not exist."""
        matrix = self._matrices(layer).get(name)
        if matrix is None or not 0 <= expert < len(matrix) or not 0 <= start <= start + size <= matrix.shape[1]:
            raise FrameError(f"layer {layer} has no rows {start} to {start + size} of {name} of remote expert {expert}")
        return matrix[expert, start : start + size]

    def unwritten(self) -> list[tuple[str, int, int]]:
        """Return (name, number of NaNs, number of elements) of each matrix that contains NaN."""
        report: list[tuple[str, int, int]] = []
        for layer, matrices in self._layers.items():
            for name, matrix in matrices.items():
                if not bool(torch.isnan(matrix.sum(dtype=torch.float32))):
                    continue
                for expert, num_missing in enumerate(torch.isnan(matrix).sum((1, 2)).tolist()):
                    if num_missing:
                        report.append(
                            (f"layer {layer} {name} of remote expert {expert}", num_missing, matrix[0].numel())
                        )
        return report

    def commit(self, version: int) -> None:
        """Serve the weights as ``version``. Raises ``FrameError`` if they contain NaN or ``version`` is not positive."""
        if incomplete := self.unwritten():
            names = ", ".join(name for name, _, _ in incomplete[:MAX_NAMED])
            raise FrameError(f"{len(incomplete)} matrices are not complete: {names}")
        if version < 1:
            raise FrameError(f"version {version} is not positive")
        self.version = version

    def sums(self, layer: int, rows_NH: Tensor, ids: Ids, weights: Weights) -> Tensor:
        """Return the weighted sums of expert outputs that a request asks for, [N, H] in float32.

        Raises ``FrameError`` if the layer has no remote experts, or an id is neither -1 nor that of an expert.
        """
        matrices = self._matrices(layer)
        num_experts = len(matrices["w13"])
        ids = ids.copy()  # the engine could change shared memory after the check
        if ids.size and (int(ids.min()) < -1 or int(ids.max()) >= num_experts):
            wrong_id = int(ids.max()) if int(ids.min()) >= -1 else int(ids.min())
            raise FrameError(f"layer {layer} has {num_experts} remote experts, and a request names {wrong_id}")
        return expert_sums(rows_NH, ids, weights, matrices["w13"], matrices["w2"])

    def _matrices(self, layer: int) -> dict[str, Tensor]:
        if layer not in self._layers:
            raise FrameError(f"layer {layer} has no remote experts")
        return self._layers[layer]
