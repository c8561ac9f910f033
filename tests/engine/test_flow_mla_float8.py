"""FlowMLA with FP8 weights and a scale for each block: post-processing after a load, and updates."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slime_like.config.schema.flow_mla import FlowOptions
from slime_like_plugins.flow_mla.sharding import ShardedWeights, module_obstacle
from tests.engine.flow_models import GlooRanks

RANKS, SLOTS, LAYERS = 2, 2, 5
BLOCK, SHAPE = 16, (48, 64)


class BlockParameter(nn.Parameter):
    """Parameter whose loader is a property, like SGLang's quantised parameters (checked by tests/upstream)."""

    def __new__(cls, data: Tensor, weight_loader: Any) -> Any:
        return super().__new__(cls, data=data, requires_grad=False)

    def __init__(self, data: Tensor, weight_loader: Any) -> None:
        self._weight_loader = weight_loader

    @property
    def weight_loader(self) -> Any:
        return self._weight_loader


class BlockLinear(nn.Module):
    """A linear layer with FP8 weights. Its post-processing needs full matrices: it rounds scales to powers of two."""

    def __init__(self) -> None:
        super().__init__()
        scales = torch.empty(SHAPE[0] // BLOCK, SHAPE[1] // BLOCK)
        self.weight: Any = BlockParameter(torch.empty(SHAPE, dtype=torch.float8_e4m3fn), self.load)
        self.weight_scale_inv: Any = BlockParameter(scales, self.load)

    @staticmethod
    def load(parameter: nn.Parameter, checkpoint_weight: Tensor) -> None:
        parameter.data.copy_(checkpoint_weight)

    def postprocess(self) -> None:
        """Change weights and scales in place, as SGLang does for some kernels."""
        full = self.dequantised()
        scales = torch.exp2(torch.ceil(torch.log2(self.weight_scale_inv.data)))
        self.weight_scale_inv.data.copy_(scales)
        self.weight.data.copy_((full / expand(scales)).to(torch.float8_e4m3fn))

    def dequantised(self) -> Tensor:
        return self.weight.data.float() * expand(self.weight_scale_inv.data)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.dequantised().T


class BlockLayer(nn.Module):
    """A decoder layer whose attention is one projection."""

    def __init__(self) -> None:
        super().__init__()
        self.o_proj = BlockLinear()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.o_proj(x)).repeat(1, 2)[:, : SHAPE[1]]


def expand(scales: Tensor) -> Tensor:
    """Return the scale of each element."""
    return scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)


def load(layers: list[BlockLayer], seed: int, weights: ShardedWeights | None, *, postprocess: bool = True) -> None:
    """Load new weights by the parameters' loaders and post-process them."""
    generator = torch.Generator().manual_seed(seed)
    for layer in layers:
        linear = layer.o_proj
        checkpoint_weight = torch.randn(SHAPE, generator=generator).to(torch.float8_e4m3fn)
        linear.weight.weight_loader(linear.weight, checkpoint_weight)
        scales = 0.1 + torch.rand(linear.weight_scale_inv.shape, generator=generator)
        linear.weight_scale_inv.weight_loader(linear.weight_scale_inv, scales)
    hooks: Any = importlib.import_module("slime_like_plugins.flow_mla.hooks")
    for layer in layers if postprocess else ():
        if weights is None:
            layer.o_proj.postprocess()
        else:
            hooks.postprocess_float8(lambda method, module: module.postprocess(), None, layer.o_proj)


def outputs(layers: list[BlockLayer]) -> Tensor:
    """Run the layers."""
    x = torch.linspace(-1, 1, SHAPE[1]).expand(3, -1)
    for layer in layers:
        x = layer(x)
    return x


@pytest.mark.parametrize("transport", ["collective", "p2p"])
def test_fp8_blocks_are_sharded_after_post_processing(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Post-processed loads agree with full layers; a load without post-processing gives other results."""
    group = GlooRanks(RANKS, SLOTS)
    hooks: Any = importlib.import_module("slime_like_plugins.flow_mla.hooks")
    rank_models: dict[int, tuple[list[BlockLayer], ShardedWeights]] = {}
    for rank in range(RANKS):
        weights = ShardedWeights(FlowOptions(), rank, RANKS, group.gather(rank, transport))
        rank_models[rank] = [BlockLayer() for _ in range(LAYERS)], weights
        for layer in rank_models[rank][0]:
            weights.add(layer)
    monkeypatch.setattr(
        hooks, "_models", [weights for _, weights in rank_models.values()]
    )  # the hook finds the weights of a rank by their module

    def work(rank: int) -> None:
        layers, weights = rank_models[rank]
        weights.bind()
        per_layer = SHAPE[0] * SHAPE[1] + 4 * SHAPE[0] * SHAPE[1] // BLOCK**2
        padded = -(-per_layer // 128) * 128
        assert weights.held_bytes() == LAYERS * padded // RANKS + padded
        for seed in (1, 2):
            load(layers, seed, weights)
            if seed == 1:
                assert weights.finish_loading().full == LAYERS * per_layer and not weights.aliases()
                assert weights.held_bytes() == LAYERS * padded // RANKS + SLOTS * padded
            reference = [BlockLayer() for _ in range(LAYERS)]
            load(reference, seed, None)
            assert torch.equal(outputs(layers), outputs(reference))
            assert torch.equal(outputs(layers), outputs(reference)), "the next forward"
        load(layers, 3, weights, postprocess=False)
        load(reference, 3, None)
        assert not torch.equal(outputs(layers), outputs(reference)), "post-processing has no effect in this test"

    group.run(work)


def test_weights_that_leave_their_slot_stop_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that need scales of a different type repack the scales after a load."""
    hooks: Any = importlib.import_module("slime_like_plugins.flow_mla.hooks")
    group = GlooRanks(1, SLOTS)

    def work(rank: int) -> None:
        weights, layer = ShardedWeights(FlowOptions(), 0, 1, group.gather(0)), BlockLayer()
        weights.add(layer)
        weights.bind()
        monkeypatch.setattr(hooks, "_models", [weights])

        def repack(method: object, module: Any) -> None:
            module.weight_scale_inv.data = module.weight_scale_inv.data.clone()

        with pytest.raises(SystemExit, match=r"sharded layer 0: o_proj\.weight_scale_inv is not in its slot"):
            hooks.postprocess_float8(repack, None, layer.o_proj)

    group.run(work)


def test_other_quantised_weights_are_refused() -> None:
    linear = BlockLinear()
    assert module_obstacle("self_attn.o_proj", linear) is None
    assert "remove kv_b_proj" in (module_obstacle("self_attn.kv_b_proj", linear) or "")
    linear.weight_scale_inv.data = linear.weight_scale_inv.data.to(torch.uint8)
    assert "float32" in (module_obstacle("self_attn.o_proj", linear) or "")
    del linear.weight_scale_inv
    assert "scale for each block" in (module_obstacle("self_attn.o_proj", linear) or "")
    assert "not a plain linear layer" in (module_obstacle("self_attn.o_proj", nn.Module()) or "")
