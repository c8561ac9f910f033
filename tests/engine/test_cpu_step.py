"""A decode step in one C call is bitwise equal to separate calls of its kernels and products. No engine, no SGLang."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slime_like.util.deadline import scale
from slime_like_plugins.sglang_cpu import build, decode
from slime_like_plugins.sglang_cpu.decode import DecodeStep
from slime_like_plugins.sglang_cpu.kernels import CKernels
from slime_like_plugins.sglang_cpu.products import Products
from slime_like_plugins.sglang_cpu.structure import DecoderBlock
from tests.engine.c_kernels import C, has_products
from tests.hypothesis_examples import num_examples

pytestmark = pytest.mark.skipif(not has_products(), reason="no C compiler, or a CPU without its products")
ROOT = Path(__file__).resolve().parents[2]
LAYERS, VOCABULARY, LENGTH = 3, 70, 40
SCALE, EPS = 0.2, 1e-6


class StepModel:
    """Attributes of an SGLang model that ``DecodeStep`` reads. The model has norms of heads, or biases."""

    def __init__(self, dtype: torch.dtype, heads: tuple[int, int, int], width: int, has_biases: bool) -> None:
        count, kv_count, dim = heads
        self.dtype, self.hidden = dtype, 48
        self._random = torch.Generator().manual_seed(width)
        attention = SimpleNamespace(num_heads=count, num_kv_heads=kv_count, head_dim=dim)
        self.blocks = [self._block(index, heads, width, has_biases) for index in range(LAYERS)]
        norm = SimpleNamespace(weight=self._draw(self.hidden), variance_epsilon=EPS)
        self.model = SimpleNamespace(layers=[SimpleNamespace(self_attn=attention)], norm=norm)
        self.lm_head = self._linear(VOCABULARY, self.hidden)
        self.pools = [(self._draw(200, kv_count, dim), self._draw(200, kv_count, dim)) for _ in range(LAYERS)]

    def load_weights(self) -> None:
        """Do nothing; ``Products`` wraps this function."""

    def get_key_buffer(self, layer: int) -> Tensor:
        return self.pools[layer][0]

    def get_value_buffer(self, layer: int) -> Tensor:
        return self.pools[layer][1]

    @property
    def linears(self) -> list[Any]:
        return [x for b in self.blocks for x in (b.qkv, b.out, b.gate_up, b.down)]

    def _draw(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._random).to(self.dtype)

    def _linear(self, columns: int, depth: int, bias: bool = False) -> Any:
        weight = (self._draw(columns, depth) * depth**-0.5).contiguous()
        return SimpleNamespace(weight=weight, bias=self._draw(columns) if bias else None)

    def _norm(self, size: int) -> Any:
        return SimpleNamespace(weight=self._draw(size))

    def _block(self, index: int, heads: tuple[int, int, int], width: int, has_biases: bool) -> DecoderBlock:
        count, kv_count, dim = heads
        norms = (None, None) if has_biases else (self._norm(dim), self._norm(dim))
        return DecoderBlock(
            attention_norm=self._norm(self.hidden),
            qkv=self._linear((count + 2 * kv_count) * dim, self.hidden, bias=has_biases),
            q_norm=norms[0],
            k_norm=norms[1],
            out=self._linear(self.hidden, count * dim, bias=has_biases),
            mlp_norm=self._norm(self.hidden),
            gate_up=self._linear(2 * width, self.hidden, bias=has_biases),
            down=self._linear(self.hidden, width, bias=has_biases),
            attention=SimpleNamespace(layer_id=index, scaling=SCALE),
        )


class PaddedScores(CKernels):
    """Kernels with a second buffer after the scores of all threads, which no thread may write."""

    def scores(self, table: Tensor) -> tuple[Tensor, int]:
        _, scores = super().scores(table)
        self.room = torch.full((2, self.threads * scores), float("nan"))
        return self.room, scores


def run_separately(model: StepModel, x: Tensor, angles: tuple[Tensor, Tensor], backend: Any, batch: Any) -> Tensor:
    """Return logits [B, V] by separate calls of the kernels and products, which other tests check."""
    c, rows = C(), len(x)
    count, dim = model.model.layers[0].self_attn.num_heads, model.model.layers[0].self_attn.head_dim

    def product(tensor: Tensor, linear: Any) -> Tensor:
        out = torch.empty(rows, len(linear.weight), dtype=x.dtype)
        return c.product(tensor, c.pack(linear.weight), linear.bias, out)

    delta, h = None, torch.empty_like(x)
    for block, pools in zip(model.blocks, model.pools, strict=True):
        c.add_rms_norm(x, delta, block.attention_norm.weight, h, EPS)
        queries = torch.empty(rows, count, dim, dtype=x.dtype)
        norms = None if block.q_norm is None or block.k_norm is None else (block.q_norm.weight, block.k_norm.weight)
        c.rope_and_store(product(h, block.qkv), norms, angles, batch.out_cache_loc, pools, queries, EPS)
        table = backend.req_to_token_pool.req_to_token
        attended = c.attention(queries, pools, table, batch.req_pool_indices, batch.seq_lens, SCALE)
        c.add_rms_norm(x, product(attended.view(rows, -1), block.out), block.mlp_norm.weight, h, EPS)
        gate_up = product(h, block.gate_up)
        activated = torch.empty(rows, gate_up.shape[1] // 2, dtype=x.dtype)
        c.silu_mul(gate_up, activated)
        delta = product(activated, block.down)
    c.add_rms_norm(x, delta, model.model.norm.weight, h, EPS)
    return product(h, model.lm_head)


@settings(deadline=None, max_examples=num_examples(40))
@given(
    rows=st.integers(1, 30),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    heads=st.sampled_from([(4, 2, 32), (6, 1, 20), (2, 2, 64)]),
    width=st.sampled_from([64, 90]),
    has_biases=st.booleans(),
    threads=st.integers(1, 3),
)
def test_a_step_has_the_bits_of_its_parts(
    rows: int, dtype: torch.dtype, heads: tuple[int, int, int], width: int, has_biases: bool, threads: int
) -> None:
    model = StepModel(dtype, heads, width, has_biases)
    random = torch.Generator().manual_seed(rows)
    lens = torch.randint(1, LENGTH + 1, (rows,), generator=random)
    table = torch.randint(100, 200, (rows + 2, LENGTH), generator=random, dtype=torch.int32)
    rows_B, slots_B = torch.randperm(rows + 2, generator=random)[:rows], torch.randperm(100, generator=random)[:rows]
    table[rows_B, lens - 1] = slots_B.int()  # each request reads the slot that it writes
    backend = SimpleNamespace(req_to_token_pool=SimpleNamespace(req_to_token=table), token_to_kv_pool=model)
    batch = SimpleNamespace(out_cache_loc=slots_B, req_pool_indices=rows_B, seq_lens=lens)
    angles = torch.rand(LENGTH, heads[2], generator=random), lens - 1
    x = torch.randn(rows, model.hidden, generator=random).to(dtype)
    num_threads_before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        product = Products(model, model.linears, model.lm_head, C())
        roomy = PaddedScores(build.build().path)
        step = DecodeStep(model, model.blocks, product, roomy)
        assert step.supports(rows) is (rows >= C().threads)
        product.renew()
        pools_before = [(keys.clone(), values.clone()) for keys, values in model.pools]
        logits = step(x.clone(), angles, backend, batch)
        assert roomy.room[1].isnan().all() and not roomy.room[0].isnan().all()
        written_pools, model.pools = model.pools, pools_before
        expected = run_separately(model, x.clone(), angles, backend, batch)
        pools_before = [(keys.clone(), values.clone()) for keys, values in pools_before]
        repeated_logits = step(
            x.clone(), angles, backend, batch
        )  # with other pools, whose addresses the step has to read again
        for linear in (*model.linears, model.lm_head):  # as a push does
            linear.weight.mul_(0.5)
        product.renew()
        pushed_logits = step(x.clone(), angles, backend, batch)
        expected_pushed = run_separately(model, x.clone(), angles, backend, batch)
    finally:
        torch.set_num_threads(num_threads_before)
    assert logits.isfinite().all() and torch.equal(logits, expected) and torch.equal(repeated_logits, expected)
    assert torch.equal(pushed_logits, expected_pushed) and not torch.equal(pushed_logits, expected)
    for actual, expected_pool in zip(written_pools, pools_before, strict=True):
        assert torch.equal(actual[0], expected_pool[0]) and torch.equal(actual[1], expected_pool[1])


def test_an_unsupported_model_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = C().threads

    def serves(model: StepModel, rows: int = 4 * threads) -> bool:
        product = Products(model, model.linears, model.lm_head, C())
        return DecodeStep(model, model.blocks, product, C()).supports(rows)

    model = StepModel(torch.bfloat16, (4, 2, 32), 64, has_biases=False)
    assert serves(model, threads) and not serves(model, threads - 1)
    monkeypatch.setattr(decode, "CACHED_BYTES", 1)  # each thread reads all weights, which only pays for several rows
    assert serves(model) and not serves(model, 4 * threads - 1)
    block = model.blocks[0]
    for changed_block in (
        replace(block, down=model._linear(model.hidden, 63)),  # odd number of inputs
        replace(block, gate_up=model._linear(132, model.hidden), down=model._linear(model.hidden, 66)),
        replace(block, attention=SimpleNamespace(layer_id=0, scaling=0.3)),
    ):
        model.blocks[0] = changed_block
        assert not serves(model)
        model.blocks[0] = block
    assert serves(model)


NESTED = """
from tests.engine import test_cpu_step
test_cpu_step.test_a_step_has_the_bits_of_its_parts()
"""


@pytest.mark.slow
def test_a_step_is_one_parallel_region_if_nesting_is_enabled() -> None:
    """Threads of an inner region would write into the buffers of another thread."""
    environment = os.environ | {"OMP_NESTED": "true", "OMP_NUM_THREADS": "3"}
    command = [sys.executable, "-c", NESTED]
    result = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300 * scale()
    )
    assert result.returncode == 0, result.stderr
