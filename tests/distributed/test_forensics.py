"""Forensics of hangs: a rank that stops, skips an op or passes other data is named within the deadline."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slime_like.cluster.supervise import crash
from slime_like.cluster.supervise.crash import write_bundle
from slime_like.config.schema.collectives import canonical
from slime_like.distributed.forensics import ring as ring_module
from slime_like.distributed.forensics.report import dump, findings, list_ranks, missing_ranks
from slime_like.distributed.forensics.ring import (
    CODES,
    FAILED,
    NO_PEER,
    OP_BITS,
    PHASE_BITS,
    PREFIX,
    RECORD,
    GroupInfo,
    Reading,
    Ring,
    read_rings,
    sweep,
)
from slime_like.errors import WorkerError
from slime_like.util.deadline import scale
from tests.distributed.hangs import GRACE_S, SECONDS, Outcomes
from tests.train.jobs import Results
from tests.train.ranks import ROOT

LIMIT_S = SECONDS + GRACE_S  # from an op with a deadline of SECONDS to the name of the rank at fault; times scale()
MEMORY = r"memory: [\d.]+ of [\d.]+ GiB \(host\) free, this rank holds [\d.]+"
GROUP = GroupInfo(0, "7", "dp", (0, 1, 2))


# ---- real ranks ------------------------------------------------------------------------------------------------------
def rings_of_mismatches(folder: Path) -> dict[str, Path]:
    """Return the folder with the rings of each mismatch."""
    return {kind: folder / kind / "rings" for kind in ("size", "op")}


def call_on_ranks(models: dict[str, Path], folder: Path) -> tuple[Any, ...]:
    """Return the call that the ranks of this file run."""
    for path in (folder / "rings", *(rings.parent for rings in rings_of_mismatches(folder).values())):
        path.mkdir()
    return "tests.distributed.hangs:on_forks", 1, folder / "rings", rings_of_mismatches(folder)


@pytest.fixture(scope="module")
def folder(folder_of_ranks: Path) -> Path:
    return folder_of_ranks / __name__


@pytest.fixture(scope="module")
def outcomes(results: Results) -> Outcomes:
    (outcomes_of_forks,) = results[__name__]
    return outcomes_of_forks


@pytest.fixture(scope="module")
def cases(outcomes: Outcomes) -> list[dict[str, tuple[str, float]]]:
    return outcomes.cases


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("case", "fault"),
    [
        (
            "stopped",
            r"all_reduce #4 in group world: did not arrive: rank 1 \(process \d+ stopped, last op all_reduce #3",
        ),
        ("skips", r"all_reduce #4 in group world: did not arrive: rank 1 \(process \d+ running, last op all_reduce #3"),
        ("no send", r"irecv #1 in group world: did not arrive: rank 1, the sender \(process \d+ running"),
    ],
)
def test_the_rank_at_fault_is_named(case: str, fault: str, cases: list[dict[str, tuple[str, float]]]) -> None:
    failed_ranks = [rank[case] for rank in (cases[0], cases[2]) if rank[case][0]]
    assert failed_ranks
    message, seconds = failed_ranks[0]
    first = message.splitlines()[0]
    assert re.search(fault, first), message
    assert "failed on rank" in first
    assert "phase step, in group world (ranks 0, 1, 2)" in first
    assert re.search(MEMORY, message)
    assert seconds < LIMIT_S * scale()


@pytest.mark.ranks
def test_a_rank_missing_at_a_rebuild_of_communicators_is_named(
    cases: list[dict[str, tuple[str, float]]],
) -> None:
    for rank in (0, 2):
        message, seconds = cases[rank]["misses rebuild"]
        prefix = r"communicators of group world \(ranks 0, 1, 2\) could not be rebuilt for phase push on rank "
        pattern = r" \(rebuild #1\): did not arrive: rank 1 \(process \d+ running, last op barrier #4"
        assert re.match(f"{prefix}{rank}{pattern}", message), message
        assert re.search(MEMORY, message)
        assert seconds < LIMIT_S * scale()


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("size", "rank 1 issued all_reduce of 256 bytes; ranks 0, 2 all_reduce of 128 bytes"),
        ("op", "rank 1 issued broadcast of 128 bytes; ranks 0, 2 all_reduce of 128 bytes"),
    ],
)
def test_a_mismatch_is_found_in_the_rings_of_dead_ranks(
    kind: str,
    fault: str,
    outcomes: Outcomes,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The driver reads the rings within the deadline of the op and adds the findings to its crash bundle."""
    run_dir, rings_folder = tmp_path / "run", rings_of_mismatches(folder)[kind]  # not swept by other runs
    monkeypatch.setattr(crash, "ring_folder", {str(run_dir): rings_folder}.__getitem__)
    error, ended_ns = outcomes.mismatches[kind]
    assert "ended with" in error
    first = findings(read_rings(rings_folder))[0]
    bundle = write_bundle(run_dir, WorkerError("trainer rank 1 died", died=True))
    assert first.headline.endswith(f"#2 in group world: {fault}")
    assert (ended_ns - first.since_ns) / 1e9 < LIMIT_S * scale()
    text = (bundle / "collectives.txt").read_text()
    assert f"#2 in group world: {fault}" in text.splitlines()[0]
    for rank in range(3):
        state = rf"trainer_rank{rank}: process \d+ dead, memory [\d.]+ s ago: [\d.]+ of [\d.]+ GiB free, it held [\d.]+"
        assert re.search(state, text), text


@pytest.mark.ranks
def test_rings_are_removed_with_their_ranks(folder: Path, cases: list[dict[str, tuple[str, float]]]) -> None:
    assert len(cases) == 3
    assert list((folder / "rings").iterdir()) == []


@pytest.mark.ranks
def test_the_watchdog_reports_hangs_that_torch_does_not_notice(cases: list[dict[str, tuple[str, float]]]) -> None:
    text, _ = cases[0]["unnoticed"]
    assert re.match("a collective did not end in 2 s\n", text)
    assert re.search(r"all_reduce #2 in group world: did not arrive: rank 1 \(process \d+ running", text)
    assert re.search(MEMORY, text)


@pytest.mark.ranks
def test_the_ring_of_a_killed_rank_is_read_and_then_swept(tmp_path: Path) -> None:
    folder = tmp_path / f"{PREFIX}killed"
    code = "from tests.distributed.hangs import *; killed(RankWorld(0, 1, '', 0), Path(__import__('sys').argv[1]))"
    result = subprocess.run([sys.executable, "-c", code, str(folder)], cwd=ROOT, timeout=120 * scale(), check=False)
    assert result.returncode == -9
    text = dump(folder)
    assert "trainer_rank0: process" in text
    assert re.search(r"dead, memory [\d.]+ s ago: [\d.]+ of [\d.]+ GiB free, it held [\d.]+; oldest first", text)
    assert "all_reduce #1 in world, phase start: 16 bytes" in text
    living = Ring(tmp_path / f"{PREFIX}living", "trainer_rank0", 8)
    assert sweep(tmp_path) == [folder]
    assert not folder.exists()
    second = Ring(tmp_path / f"{PREFIX}living", "trainer_rank1", 8)
    living.close()
    assert [path.name for path in (tmp_path / f"{PREFIX}living").iterdir()] == ["trainer_rank1.ring"]
    shutil.rmtree(tmp_path / f"{PREFIX}living")  # as another rank may do concurrently
    second.close()
    assert not (tmp_path / f"{PREFIX}living").exists()


# ---- rings made by hand ----------------------------------------------------------------------------------------------
def write(
    ring: Ring, op: str, sequence: int, size: int, *, ended: int = 5, peer: int = NO_PEER, started: int = 1
) -> None:
    index, *_ = ring.next_record()
    code = CODES[op] | ring.phase_number("step") << OP_BITS | GROUP.number << (OP_BITS + PHASE_BITS)
    RECORD.pack_into(ring.memory, ring.first_word(index) * 8, index, started, ended, size, code, sequence, peer)


def rings(folder: Path, size: int = 3, slots: int = 8) -> list[Ring]:
    new_rings = [Ring(folder, f"trainer_rank{rank}", slots) for rank in range(size)]
    for ring in new_rings:
        ring.add_group(GROUP)
    return new_rings


def test_the_newest_ops_are_kept(tmp_path: Path) -> None:
    (ring,) = rings(tmp_path, 1, slots=5)
    for number in range(1, 21):
        write(ring, "all_reduce", number, 4 * number)
    reading = read_rings(tmp_path)["trainer_rank0"]
    assert ring.slots == 8
    assert [record.sequence for record in reading.records] == list(range(13, 21))
    assert (reading.pid, reading.state) == (os.getpid(), "running")
    assert reading.records[-1].op is canonical("k", "all_reduce")
    assert (reading.records[-1].phase, reading.records[-1].group, reading.records[-1].num_bytes) == ("step", GROUP, 80)


def test_agreeing_ranks_have_no_findings(tmp_path: Path) -> None:
    for ring in rings(tmp_path):
        for number in range(1, 30):
            write(ring, "all_reduce", number, 8)
    assert findings(read_rings(tmp_path)) == []
    assert "none waits in one" in dump(tmp_path)


def test_a_skipped_op_is_found_where_the_ranks_diverge(tmp_path: Path) -> None:
    """Equal ops pair up wrongly and hang only at the end; different ops show the position."""
    for rank, ring in enumerate(rings(tmp_path)):
        ops = [("all_reduce", 8), ("broadcast", 4), ("all_reduce", 16)]
        for number, (op, size) in enumerate(ops if rank != 1 else ops[:1] + ops[2:], start=1):
            write(ring, op, number, size, ended=0 if number > 1 else 5)
    (finding,) = findings(read_rings(tmp_path))
    assert finding.sequence == 2
    assert finding.mismatches == ("rank 1 issued all_reduce of 16 bytes", "ranks 0, 2 broadcast of 4 bytes")


def test_the_root_of_a_chain_of_waits_comes_first(tmp_path: Path) -> None:
    """Rank 2 waits for rank 0, which waits for rank 1."""
    trainer_rings = rings(tmp_path)
    write(trainer_rings[0], "irecv", 1, 8, ended=0, peer=1, started=10)
    write(trainer_rings[2], "irecv", 1, 8, ended=0, peer=0, started=20)
    first, second = findings(read_rings(tmp_path))
    assert first.headline.startswith("irecv #1 in group dp: did not arrive: rank 1, the sender")
    assert "rank 0, the sender" in second.headline
    assert "in irecv #1 of group dp" in second.headline
    write(trainer_rings[1], "isend", 1, 8, peer=0)
    assert [finding.since_ns for finding in findings(read_rings(tmp_path))] == [20]


def test_a_rank_that_died_in_an_op_is_named(tmp_path: Path) -> None:
    for ring in rings(tmp_path):
        write(ring, "barrier", 1, 0, ended=FAILED)
    readings = read_rings(tmp_path)
    dead = readings["trainer_rank2"]
    readings["trainer_rank2"] = Reading(dead.name, dead.pid, "dead", dead.records)
    (finding,) = findings(readings)
    assert finding.headline == f"barrier #1 in group dp: arrived, but then: rank 2 (process {dead.pid} dead)"


def test_a_rank_in_another_container_is_not_reported_as_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers may share /dev/shm but not process ids."""
    for ring in rings(tmp_path):
        write(ring, "barrier", 1, 0, ended=0)
        ring.words[1] = 1 << 30  # a process id that does not exist here
        ring.record_rebuild(1)
    assert "dead" in findings(read_rings(tmp_path))[0].headline
    monkeypatch.setattr(ring_module, "pid_namespace", lambda: 1)
    (finding,) = findings(read_rings(tmp_path))
    assert finding.headline == "barrier #1 in group dp: every rank arrived"
    assert f"trainer_rank0: process {1 << 30} in another container, " in dump(tmp_path)
    assert missing_ranks(read_rings(tmp_path), range(3), "trainer", 1).startswith("every rank")


def test_groups_of_other_worlds_and_roles_are_kept_separate(tmp_path: Path) -> None:
    foreign = GroupInfo(1, "weights_rank0", "weights", (0, 1), foreign=True)
    trainers, critic = rings(tmp_path, 2), Ring(tmp_path, "critic_rank0", 8)
    critic.add_group(GroupInfo(0, GROUP.name, "dp", (0,)))
    write(critic, "all_reduce", 1, 999)
    trainers[0].add_group(foreign)
    index, *_ = trainers[0].next_record()
    code = CODES["broadcast"] | foreign.number << (OP_BITS + PHASE_BITS)
    RECORD.pack_into(trainers[0].memory, trainers[0].first_word(index) * 8, index, 1, 0, 4, code, 1, NO_PEER)
    assert findings(read_rings(tmp_path)) == []


def test_ranks_of_other_nodes_are_not_blamed(tmp_path: Path) -> None:
    """Ranks 0 and 1 are on this node. They wait in the third op, and so may rank 2."""
    trainers = rings(tmp_path, 2)
    for ring in trainers:
        for number in (1, 2):
            write(ring, "all_reduce", number, 8)
    assert findings(read_rings(tmp_path)) == [], "ops that have ended are not reported"
    for ring in trainers:
        write(ring, "all_reduce", 3, 8, ended=0)
    (finding,) = findings(read_rings(tmp_path))
    assert finding.headline == "all_reduce #3 in group dp: every rank on this node arrived; not recorded here: ranks 2"
    write(trainers[0], "all_reduce", 4, 8, ended=0)
    (finding,) = findings(read_rings(tmp_path))
    assert (finding.sequence, finding.absent) == (3, ()), "the first op in which a rank waits"


def test_a_receive_from_another_node_does_not_blame_the_sender(tmp_path: Path) -> None:
    (ring,) = rings(tmp_path, 1)
    write(ring, "irecv", 1, 8, ended=0, peer=2)
    (finding,) = findings(read_rings(tmp_path))
    assert finding.headline == "irecv #1 in group dp: every rank on this node arrived; not recorded here: ranks 2"


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ((3,), "3"),
        (tuple(range(8)), "0, 1, 2, 3, 4, 5, 6, 7"),
        (tuple(range(256)), "0-255"),
        ((*range(8), *range(16, 24), 40), "0-7, 16-23, 40"),
        (tuple(range(0, 8192, 8)), "0, 8, 16, 24, 32, 40, 48 ... 8184 (1024 ranks)"),
    ],
)
def test_many_ranks_are_listed_as_ranges(ranks: tuple[int, ...], text: str) -> None:
    assert list_ranks(ranks) == text
