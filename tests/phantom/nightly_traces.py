"""Traced memory of the shipped recipes that ``test_trace.py`` leaves out, each in a process of its own. Run by the nightly CI."""

from __future__ import annotations

import pytest

from slime_like.cluster.plan import trace as trace_module
from tests.phantom.test_trace import NIGHTLY_RECIPES
from tests.phantom.trace_checks import check_recipe
from tests.train.ranks import run_ranks

pytestmark = pytest.mark.ranks


# Recipe -> a known difference, with which its test fails.
KNOWN = {
    "qwen3_5_35b_a3b": "the planner's main memory is 10.7% above the traced one; the GPU's memory agrees within 1%, and fits"
}
RECIPES = [
    pytest.param(name, marks=[pytest.mark.xfail(reason=KNOWN[name], strict=True)] if name in KNOWN else [])
    for name in NIGHTLY_RECIPES
]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_fits_its_hardware(name: str) -> None:
    target, environment = "tests.phantom.trace_checks:trace_one", trace_module.TRACED_GPU.environment()
    (out,) = run_ranks(target, 1, name, NIGHTLY_RECIPES[name], environment=environment, seconds=1_800)
    check_recipe(name, out)
