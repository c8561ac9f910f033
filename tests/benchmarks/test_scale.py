"""Simulated engines of ``benchmarks/scale.py`` under the real pool: a push and health checks of each."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from benchmarks.scale_engines import ControlEndpoints, measure, median
from slime_like.errors import WeightSyncError


def test_every_engine_takes_part_in_a_push(monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[str] = []
    original = ControlEndpoints.app

    def counting_app(engine: ControlEndpoints) -> web.Application:
        app = original(engine)

        async def count(request: web.Request, _: web.StreamResponse) -> None:
            requests.append(request.path)

        app.on_response_prepare.append(count)
        return app

    monkeypatch.setattr(ControlEndpoints, "app", counting_app)
    times = asyncio.run(measure(3, rounds=2))
    assert times.num_engines == 3 and min(times.begin, times.commit, times.resume, times.health) > 0
    pushes = 3  # one opens the connections
    for path in ("/pause_generation", "/end_weight_update", "/model_info", "/continue_generation", "/health_generate"):
        assert requests.count(path) == 3 * pushes, path


def test_an_engine_with_another_version_ends_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    async def stale(_: ControlEndpoints, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": "7"})

    monkeypatch.setattr(ControlEndpoints, "_get", stale)
    with pytest.raises(WeightSyncError, match="reports version 7 after the commit of version 1"):
        asyncio.run(measure(2, rounds=1))


@pytest.mark.parametrize(("values", "result"), [([3.0], 3.0), ([1.0, 2.0], 1.0), ([9.0, 1.0, 5.0], 5.0)])
def test_the_median_is_a_measured_value(values: list[float], result: float) -> None:
    assert median(values) == result
