"""Traced memory of the shipped recipes that ``test_trace.py`` leaves out, each in a process of its own. Run by the nightly CI."""

from __future__ import annotations

import pytest

from slime_like.cluster.plan import trace as trace_module
from tests.phantom.test_trace import NIGHTLY_RECIPES
from tests.phantom.trace_checks import check_recipe
from tests.train.ranks import run_ranks

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("name", NIGHTLY_RECIPES)
def test_a_recipe_fits_its_hardware(name: str) -> None:
    target, environment = "tests.phantom.trace_checks:trace_one", trace_module.TRACED_GPU.environment()
    (out,) = run_ranks(target, 1, name, NIGHTLY_RECIPES[name], environment=environment, seconds=1_800)
    check_recipe(name, out)
