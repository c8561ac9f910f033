"""Errors of user code carry key, line, subject and the last output of the task that failed."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from slime_like.errors import EngineLost, UserCodeError
from slime_like.util.printed import MAX_TAIL, record_output, record_streams
from slime_like.util.user_code import name_user_errors, source_place


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function to call inside the test: pytest replaces the streams between a fixture and its test."""

    def start() -> None:
        monkeypatch.setattr(sys, "stdout", sys.stdout)
        monkeypatch.setattr(sys, "stderr", sys.stderr)
        record_streams()
        record_streams()

    return start


def test_an_error_names_key_line_subject_and_output(
    record: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    record()
    with (
        pytest.raises(
            UserCodeError, match=r"rollout.filters=mine raised KeyError: 'x' \(.*test_user_code.py:\d+\), for prompt 3"
        ),
        name_user_errors("rollout.filters", "mine", "prompt 3"),
    ):
        print("looking for x")  # noqa: T201
        raise KeyError("x")
    assert capsys.readouterr().out == "looking for x\n", "also passed on, once"


def test_each_task_has_its_own_output(record: Callable[[], None]) -> None:
    record()

    async def work(number: int) -> str:
        with pytest.raises(UserCodeError) as error, name_user_errors("rollout.generate", "mine", f"prompt {number}"):
            print(f"step one of {number}")  # noqa: T201
            await asyncio.sleep(0)
            await asyncio.create_task(helper(number))
            raise ValueError("failed")
        return str(error.value)

    async def helper(number: int) -> None:
        sys.stderr.write(f"step two of {number}\n")

    async def run_both() -> list[str]:
        return list(await asyncio.gather(work(1), work(2)))

    for number, text in enumerate(asyncio.run(run_both()), 1):
        assert text.endswith(f"for prompt {number}; it printed 'step one of {number}\\nstep two of {number}'")


def test_the_end_of_a_long_output_is_kept(record: Callable[[], None]) -> None:
    record()
    with record_output() as output:
        print("x" * 3 * MAX_TAIL + "end")  # noqa: T201
    assert len(output.clause()) < MAX_TAIL + 50 and output.clause().endswith("xend'")
    print("after")  # noqa: T201
    assert "after" not in output.clause()


def test_errors_of_the_framework_pass_unchanged() -> None:
    with pytest.raises(EngineLost), name_user_errors("rollout.generate", "mine", "prompt 3"):
        raise EngineLost("engine 0 is gone")


def test_the_line_of_an_error_is_the_users_even_if_a_library_raised_it() -> None:
    with pytest.raises(UserCodeError) as error, name_user_errors("reward.name", "mine", "prompt 3"):
        json.loads("x")
    assert "(" + __file__ in str(error.value), str(error.value)


@contextlib.contextmanager
def decorated_by_a_library() -> Generator[None]:
    yield


@functools.cache
def cached() -> None: ...


def test_the_place_of_a_decorated_function_is_that_of_the_function() -> None:
    lines = Path(__file__).read_text().splitlines()
    for function, decorator in ((decorated_by_a_library, "@contextlib.contextmanager"), (cached, "@functools.cache")):
        assert source_place(function) == f"{__file__}:{lines.index(decorator) + 1}"


def test_errors_of_user_code_need_no_heavy_import() -> None:
    code = "import sys, slime_like.util.user_code; assert not {'torch', 'numpy', 'ray'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
