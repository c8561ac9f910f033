"""The runner of rank functions: results in order, the traceback of a failing rank at once, a deadline."""

from __future__ import annotations

import faulthandler

import pytest

from slime_like.errors import DeadlineExceeded
from tests.train.ranks import RankWorld, fork_ranks, run_ranks

pytestmark = pytest.mark.ranks


def greet(world: RankWorld, word: str) -> str:
    return f"{word} {world.rank} of {world.size}"


def fail_on_one(world: RankWorld) -> None:
    if world.rank == 1:
        raise ValueError("the reason")
    wait_for_ever(world)


def wait_for_ever(world: RankWorld) -> None:
    import threading

    threading.Event().wait()


def forked(world: RankWorld, seconds: float) -> list[str]:
    return [*fork_ranks(greet, 2, "fork"), *(fork_ranks(fail_on_one, 2, seconds=seconds) if seconds else [])]


def one_thread(world: RankWorld) -> str:
    """Return the error of ``await_one_thread`` while another thread runs. Joined threads cause no error."""
    import threading

    from tests.train.ranks import await_one_thread

    for _ in range(200):  # in most of these iterations a joined thread still exists
        faulthandler.dump_traceback_later(60)
        faulthandler.cancel_dump_traceback_later()
        await_one_thread()
    release = threading.Event()
    thread = threading.Thread(target=release.wait)
    thread.start()
    try:
        await_one_thread(0.1)
    except AssertionError as error:
        return str(error)
    finally:
        release.set()
    return "no error"


def test_results_come_in_rank_order() -> None:
    assert run_ranks("tests.train.test_ranks:greet", 2, "rank") == ["rank 0 of 2", "rank 1 of 2"]


def test_the_failing_rank_is_named_though_others_wait() -> None:
    with pytest.raises(AssertionError, match=r"rank 1 of 2[\s\S]*the reason"):
        run_ranks("tests.train.test_ranks:fail_on_one", 2)


def test_a_rank_that_never_ends_meets_the_deadline() -> None:
    with pytest.raises(DeadlineExceeded, match=r"ranks \[0\]"):
        run_ranks("tests.train.test_ranks:wait_for_ever", 1, seconds=0.2)


def test_forks_of_a_rank_are_ranks_too() -> None:
    assert run_ranks("tests.train.test_ranks:forked", 1, 0) == [["fork 0 of 2", "fork 1 of 2"]]
    with pytest.raises(AssertionError, match=r"rank 1 of 2[\s\S]*the reason"):
        run_ranks("tests.train.test_ranks:forked", 1, 60)


def test_a_process_is_forked_once_its_other_threads_are_gone() -> None:
    (message,) = run_ranks("tests.train.test_ranks:one_thread", 1)
    assert "would stay locked in a fork" in message
