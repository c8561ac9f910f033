"""Backends on a GPU: parity with the recurrence, and FlashQLA's speedup over fla (more shapes: benchmarks/gdn.py)."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from slime_like.config.rules.hf import GDNShape
from slime_like.config.schema.gdn import GDNConfig
from slime_like.errors import ConfigError
from slime_like_plugins.qwen_gdn.backend import GDNBackend
from slime_like_plugins.qwen_gdn.select import resolve
from tests.gdn.recurrence import LAYER_F32, CaseShape, conv_errors, errors, make_case, make_conv, of_backend, oracle
from tests.train.ranks import run_ranks
from tests.train.state_passing import PackedCase
from tests.values import has_values

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
HEADS = GDNShape(key_heads=2, value_heads=4, key_dim=128, value_dim=128, conv_width=4)
BFLOAT16 = 3e-2
TF32 = 1e-2
HOPPER = (9, 0)
FASTER = 1.5  # FlashQLA's authors report about twice fla's speed on H200 at this shape
LONG = (32_768, 16, 32, 128)  # tokens of one sequence, key heads, value heads, head size
ROUNDS = 20


def backend_or_skip(name: str) -> GDNBackend:
    try:
        return resolve(GDNConfig(backend=name), "cuda", "bfloat16", HEADS)
    except ConfigError as refused:
        pytest.skip(str(refused))


@pytest.mark.parametrize("name", ["torch", "fla", "flashqla"])
@pytest.mark.parametrize("decay", [0.01, 0.3, 8.0])
@pytest.mark.parametrize("wide", [LAYER_F32, ("g",)], ids=["as the layer calls", "beta and state of 16 bits"])
def test_parity(name: str, decay: float, wide: tuple[str, ...]) -> None:
    backend = backend_or_skip(name)
    shape = CaseShape((200, 1, 0, 70), heads=2, groups=2, key=128, value=128, tail=5)
    case = make_case(shape, decay=decay)
    largest_errors = errors(of_backend(backend, case.to(torch.bfloat16, "cuda", wide=wide)), oracle(case))
    assert not has_values() or max(largest_errors.values()) <= BFLOAT16, largest_errors


@pytest.mark.parametrize("name", ["torch", "fla", "flashqla"])
def test_convolution(name: str) -> None:
    case = make_conv((70, 1, 0, 9), 4, tail=3, halo=True, channels=64).to(torch.float64, "cuda")
    largest_errors = conv_errors(backend_or_skip(name), case, torch.bfloat16)
    assert not has_values() or max(largest_errors) <= BFLOAT16


def test_two_gpus_share_a_stream_by_flas_context_parallelism() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    backend_or_skip("fla")
    streams = [PackedCase((5, 150, 6), 4.0), PackedCase((700,), 0.01)]
    for result in run_ranks("tests.train.state_passing:on_gpus", 2, streams):
        assert max(error for errors in result for error in errors.values()) <= TF32, result


def test_unsplit_flashqla_has_equal_bits_with_and_without_gradient() -> None:
    backend = backend_or_skip("flashqla")
    case = make_case(CaseShape((4096,), heads=2, key=128, value=128, state=False), decay=0.3)
    case = case.to(torch.bfloat16, "cuda", wide=LAYER_F32)
    bounds = case.bounds.cuda()
    arguments = (case.q, case.k, case.v, case.g, case.beta)
    update = backend.chunk_rule(*arguments, cu_seqlens=bounds, cu_seqlens_cpu=case.bounds)[0]
    with torch.no_grad():
        scores = backend.chunk_rule(*arguments, cu_seqlens=bounds, cu_seqlens_cpu=case.bounds)[0]
    assert torch.equal(update, scores)


def test_flashqla_is_faster_than_fla(record_property: Callable[[str, object], None]) -> None:
    if torch.cuda.get_device_capability() != HOPPER:
        pytest.skip("the speed of FlashQLA over fla is claimed on H100 and H200")
    for name in ("fla", "flashqla"):
        backend_or_skip(name)
    gdn_arms: Any = importlib.import_module("benchmarks.gdn_arms")
    shape = gdn_arms.GdnShape((LONG[0],), *LONG[1:])
    arms, _ = gdn_arms.make_arms(["fla", "flashqla"], "cuda", "bfloat16", [shape])
    fla, flashqla = gdn_arms.measure(arms, shape, "cuda", torch.bfloat16, ROUNDS).values()
    forward, forward_backward = (
        gdn_arms.ratio(fla.forward, flashqla.forward),
        gdn_arms.ratio(fla.forward_backward, flashqla.forward_backward),
    )
    record_property("forward", forward)
    record_property("forward_and_backward", forward_backward)
    assert min(forward, forward_backward) >= FASTER, (forward, forward_backward)
