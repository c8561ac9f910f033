"""Benchmark of the rollout manager: the real manager collects every sample from a recorded engine."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

from slime_like.rollout.engine.connection import completions

manager: Any = importlib.import_module("benchmarks.manager")
recorded_engine: Any = importlib.import_module("benchmarks.recorded_engine")


@pytest.mark.slow
def test_a_rollout_of_recorded_replies_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager, "VOCAB", 2000)  # a smaller tokenizer: most texts come from it, not from the table
    line = manager.measure((16, 32), "columns", 8, 3)
    assert line["cpu_ns"] > 0 and line["rate"] > 0
    assert line["profile"].count("ns per token") == 3


def test_both_forms_of_a_recorded_reply_have_the_same_tokens() -> None:
    lists, columns = (completions([recorded_engine.item(40, 3, columns=form)], 1)[0] for form in (False, True))
    np.testing.assert_array_equal(lists.token_ids, columns.token_ids, strict=True)
    np.testing.assert_array_equal(lists.logprobs, columns.logprobs, strict=True)
    assert lists.versions == columns.versions == ((0, 40, 0),)
    assert lists.token_ids.max() < recorded_engine.VOCAB


@pytest.mark.parametrize("size", ["12", "x5", "8x", "0x4", "8x-1"])
def test_a_bad_size_is_refused(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        manager.main(["--sizes", size])
    assert "is not a number of at least 1" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        manager.main(["--sizes", "12x5", "--group", "8"])
    assert "multiple of --group 8" in capsys.readouterr().err


def test_the_busiest_of_several_managers_determines_their_rate() -> None:
    names = ("cpu_ns", "rate", "bytes", "reward_ns", "driver_ns")
    records = [
        dict(zip(names, row, strict=True)) for row in ((400.0, 2.5, 20.0, 9.0, 3.0), (500.0, 2.0, 30.0, 11.0, 5.0))
    ]
    assert manager.combine(records) == dict(zip(names, (500.0, 4.0, 25.0, 10.0, 4.0), strict=True))
    with pytest.raises(SystemExit):
        manager.main(["--sizes", "24x5", "--managers", "2"])
