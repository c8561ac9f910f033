"""Names in the code of functions, by which the plan tells which keys of a config they read."""

from __future__ import annotations

from typing import Any

import pytest

from slime_like.util import code_names
from slime_like.util.code_names import READS_ALL, names_in_code
from tests.core import code_with_names as code

POLICY_KEYS = {"kl_loss_coef", "entropy_coef", "use_rollout_logprobs", "off_policy", "kl_loss_type", "eps_clip"}


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (code.reads_attribute, {"alpha"}),
        (code.reads_by_name, {"alpha", "beta", "zeta"}),
        (code.partly, {"alpha", "beta", "zeta"}),
        (code.Loss, {"eps_clip", "delta_coef"}),
        (code.calls_functions, {"gamma", "theta", "tau"}),
        (code.calls_policy_gradient, POLICY_KEYS | {"eps_clip_c"}),
        (code.calls_by_module, POLICY_KEYS),
        (code.imports_late, POLICY_KEYS | {"eps_clip_c"}),
        (code.captured, {"kappa"}),
        (code.calls_cached, {"iota", "lambda_"}),
        (code.instance, {"alpha"}),
    ],
)
def test_names_in_the_code_of_a_function_and_of_what_it_calls(function: Any, names: set[str]) -> None:
    assert names_in_code(function) >= names


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (code.reads_attribute, POLICY_KEYS | {"beta", "zeta"}),
        (code.Loss, {"kl_loss_coef", "alpha"}),
        (code.calls_functions, {"omega"}),
        (code.calls_by_module, {"eps_clip_c"}),  # not read by cispo
        (code.annotates, POLICY_KEYS),  # read by the checks of PolicyConfig, which the code only names
        (print, POLICY_KEYS),
    ],
)
def test_names_in_other_code_are_not_included(function: Any, names: set[str]) -> None:
    assert not names_in_code(function) & names


def test_code_that_reads_every_field_is_recognised() -> None:
    assert names_in_code(code.reads_all) & READS_ALL
    for function in (code.Loss, code.calls_policy_gradient, code.annotates, code.reads_by_name):
        assert not names_in_code(function) & READS_ALL


def test_a_search_that_finds_too_many_objects_or_fails_rules_nothing_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_names, "MAX_OBJECTS", 3)
    assert names_in_code(code.calls_functions) == READS_ALL
    monkeypatch.undo()

    def fail(search: object) -> bool:
        raise RuntimeError("a lazy attribute")

    monkeypatch.setattr(code_names._Search, "run", fail)
    assert names_in_code(code.calls_functions) == READS_ALL


def test_a_long_chain_of_functions_is_searched() -> None:
    def last() -> str:
        return "the end"

    function: Any = last
    for _ in range(2_000):
        function = (lambda inner: lambda: inner())(function)
    assert "the end" in names_in_code(function)
