"""Phantom GPUs as torch sees them: memory, counted calls, copies, streams, graphs, a world of one process. No values."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slime_like.errors import ConfigError
from slime_like.phantom import build, counters
from slime_like.phantom.device import PhantomGpu
from slime_like.util.deadline import scale
from tests.train.ranks import run_ranks

GIB = 2**30
CONTEXT = 500 * 2**20
HOST_LIMIT = 64 * 2**20
PHANTOM = PhantomGpu(memory_bytes=8 * GIB, num_devices=2, host_limit=HOST_LIMIT)


@pytest.fixture(scope="module")
def observations() -> dict[str, Any]:
    (result,) = run_ranks("tests.phantom.device_checks:observe", 1, environment=PHANTOM.environment())
    return result


@pytest.mark.slow
def test_torch_sees_the_devices(observations: dict[str, Any]) -> None:
    devices = observations["devices"]
    assert devices["phantom"] and devices["names"] == ["Phantom GPU"] * 2
    assert devices["memory"] == [8 * GIB] * 2
    assert devices["capability"] == (9, 0)
    assert devices["current"] == (1, 1)


@pytest.mark.slow
def test_memory_is_limited_and_measured(observations: dict[str, Any]) -> None:
    memory = observations["memory"]
    assert memory["context"] - CONTEXT in range(32 * 2**20)  # a small block of an earlier observation is cached
    assert memory["allocated"] - 3 * GIB in range(2**20)
    assert [round(used_bytes / GIB) for used_bytes in memory["driver"]] == [3, 1]
    assert memory["free"] == 8 * GIB - CONTEXT - memory["driver"][0]
    assert "Tried to allocate 6.00 GiB" in memory["too large"]
    allocated, reserved = memory["cached"]
    assert allocated < 2**20 and reserved >= 3 * GIB
    used_bytes, peak = memory["emptied"]
    assert used_bytes < 2**25 and peak == memory["driver"][0]
    is_pinned, pinned = memory["pinned"]
    assert is_pinned and pinned >= GIB
    assert memory["twice freed"] == 1


@pytest.mark.slow
def test_calls_are_counted(observations: dict[str, Any]) -> None:
    calls = observations["calls"]
    assert calls["add"] == {"launches": 1, "products": 0, "copies_to_host": 0, "syncs": 0}
    assert calls["product"]["products"] == 1 and calls["product"]["syncs"] == 0
    assert calls["read"] == {"launches": 1, "products": 0, "copies_to_host": 1, "syncs": 1}
    assert calls["wait"] == {"launches": 0, "products": 0, "copies_to_host": 0, "syncs": 1}
    assert "synchronizing" in calls["sync refused"]


@pytest.mark.slow
def test_copies_are_carried_out_and_computed_scalars_are_zero(observations: dict[str, Any]) -> None:
    copies = observations["copies"]
    assert copies["round trip"] == copies["between devices"] == [3, 1, 2]
    assert copies["strided"] == [1.0, 5.0, 9.0]
    assert (copies["count"], copies["computed"]) == (7, 0.0)


@pytest.mark.slow
def test_virtual_memory_counts_while_it_is_mapped(observations: dict[str, Any]) -> None:
    memory = observations["virtual_memory"]
    assert set(memory["results"]) == {0} and memory["refused"] == [1, 2]
    assert memory["used"] == [0, GIB, 0, GIB, 0]


@pytest.mark.slow
def test_streams_graphs_and_launches(observations: dict[str, Any]) -> None:
    assert observations["streams"] == {"done": True, "ms": 1.0, "differ": True, "n": 8}
    assert observations["graphs"] == {"captured": True, "graphs": 1, "shape": [8]}
    assert observations["launch_checks"] == {"fits": 0, "no block": 9, "threads": 9, "rows": 9}


@pytest.mark.slow
def test_weights_are_pushed_through_handles_of_device_memory(observations: dict[str, Any]) -> None:
    """torch shares, opens and closes the memory of each bucket. The sender and the engine are one process."""
    push = observations["shared_memory"]
    assert all(push["equal"].values()) and push["reported"] == [f"w{i}" for i in range(5)]
    assert push["requests"] == 3 and push["calls"] == (3 + 3, 3 + 1, 3 + 1), "the second engine is lost"
    assert push["kept"] == 0, "the buffers are freed, also those that the lost engine has not opened"
    assert "invalid" in push["refused"]


@pytest.mark.slow
def test_weights_are_copied_to_pinned_host_memory_once(observations: dict[str, Any]) -> None:
    """A push waits once per bucket, uses no pageable memory, and copies once for engines on all machines."""
    push = observations["host_memory"]
    assert push["equal"] == [True, True] and push["reported"] == [f"w{i}" for i in range(6)]
    assert push["buckets"] == 2 and push["copies"] == (6, 0, 2)
    grown, remaining = push["pinned"]
    assert grown >= 2 * 3 * 4000 and remaining == 0
    assert push["pageable"] == 6, "the counter sees copies to pageable memory"
    assert "cannot page-lock 1 MiB" in push["refused"] and "ulimit -l" in push["refused"]


@pytest.mark.slow
def test_large_host_tensors_are_counted_and_take_no_memory(observations: dict[str, Any]) -> None:
    host = observations["large_host_tensors"]
    assert host["counted"] == (4 * GIB, 4 * GIB) and host["freed"] == (0, 0)
    assert host["pages"] == 16 * 2**20, "all of them are the same pages"
    assert host["private"] < 256 * 2**20
    assert host["of the limit"] == [HOST_LIMIT, 7], "a tensor that is not larger than the limit has its own values"


@pytest.mark.slow
def test_kernels_keep_their_checks(observations: dict[str, Any]) -> None:
    assert observations["attention"] == {
        "accepted": ([1000, 8, 128], [1000, 2, 128]),
        "data type": "FlashAttention only support fp16 and bf16 data type",
        "head dimension": "FlashAttention forward only supports head dimension at most 256",
        "type of bounds": "cu_seqlens_q must have dtype int32",
    }


@pytest.mark.slow
def test_one_process_is_a_rank_of_a_larger_world(observations: dict[str, Any]) -> None:
    solo = observations["solo_world"]
    assert solo["parts"] == [[1, 2]] * 8
    assert solo["objects"] == [{"rank": 5}] * 8
    assert solo["collectives"] >= 4


def test_other_processes_have_no_phantom() -> None:
    assert not counters.is_phantom()
    with pytest.raises(AssertionError, match="does not run on a phantom GPU"):
        counters.read_counts()


def test_the_library_is_built_once() -> None:
    path = build.library()
    assert path.name == "libcuda.so.1" and path.resolve().stat().st_size > 10_000
    assert build.library() == path


def test_missing_headers_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "include_folders", lambda: iter(()))
    with pytest.raises(ConfigError, match=r"cuda_runtime_api\.h.*setup\.sh"):
        build.library()


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(ConfigError, match="no C compiler"):
        PHANTOM.environment()


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "slime_like.phantom", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120 * scale(), check=False)


def test_a_command_runs_on_a_phantom() -> None:
    program = "import ctypes; n = ctypes.c_int(); ctypes.CDLL('libcuda.so.1').cuDeviceGetCount(ctypes.byref(n)); print(n.value)"
    result = run_command("--devices", "3", sys.executable, "-c", program)
    assert (result.returncode, result.stdout) == (0, "3\n"), result.stderr


UUIDS = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
count, nvml_count, uuid = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(16)
cuda.cuDeviceGetCount(ctypes.byref(count))
ctypes.CDLL("libnvidia-ml.so.1").nvmlDeviceGetCount_v2(ctypes.byref(nvml_count))
print(nvml_count.value, [cuda.cuDeviceGetUuid_v2(uuid, d) or uuid.raw[0] - 17 for d in range(count.value)])
"""


@pytest.mark.parametrize(
    ("variable", "expected"),
    [("2,0", "[2, 0]"), ("1,9,0", "[1]"), ("", "[]"), ("GPU-x,0", "[]"), ("0,1,2,3", "[0, 1, 2, 3]")],
)
def test_a_process_sees_the_devices_of_its_variable(variable: str, expected: str) -> None:
    command = ("--devices", "4", "env", f"CUDA_VISIBLE_DEVICES={variable}", sys.executable, "-c", UUIDS)
    result = run_command(*command)
    assert result.stdout == f"4 {expected}\n", result.stderr  # NVML lists all devices of the machine


HANDLES = """
import ctypes, os
cuda = ctypes.CDLL("libcuda.so.1")
class Handle(ctypes.Structure):
    _fields_ = [("words", ctypes.c_uint64 * 8)]
def share(text):
    memory, handle = ctypes.c_void_p(), Handle()
    assert cuda.cudaMalloc(ctypes.byref(memory), 4096) == 0
    ctypes.memmove(memory, text, len(text))
    assert cuda.cudaIpcGetMemHandle(ctypes.byref(handle), memory) == 0
    return memory, handle
def read(handle):
    memory = ctypes.c_void_p()
    return b"%d" % error if (error := cuda.cudaIpcOpenMemHandle(ctypes.byref(memory), handle, 1)) else ctypes.string_at(memory, 3)
def in_child(function):
    output, end = os.pipe()
    if not os.fork():
        os.write(end, function())
        os._exit(0)
    os.wait()
    return os.read(output, 64)
memory, handle = share(b"abc")
print(read(handle).decode(), in_child(lambda: read(handle)).decode())
cuda.cudaFree(memory)
other, _ = share(b"def")
print(other.value == memory.value, read(handle).decode(), in_child(lambda: read(handle)).decode())
print(read(Handle.from_buffer_copy(in_child(lambda: bytes(share(b"ghi")[1])))).decode())
"""


def test_handles_of_freed_memory_and_of_ended_processes_are_refused() -> None:
    """Freed memory whose address and file descriptor other memory has since taken is refused too."""
    result = run_command(sys.executable, "-c", HANDLES)
    assert result.stdout == "abc abc\nTrue 1 1\n1\n", result.stdout + result.stderr


def test_the_query_of_installed_gpus_lists_the_devices() -> None:
    program = "from slime_like.util.gpus import installed_gpus; print(*installed_gpus(), sep='\\n')"
    result = run_command("--devices", "2", "--memory", "40", "--capability", "8.9", sys.executable, "-c", program)
    assert result.stdout.splitlines() == ["Gpu(name='Phantom GPU', capability=(8, 9), num_bytes=42949672960)"] * 2
    listing = run_command("nvidia-smi", "-L")
    assert listing.returncode == 2 and "-L is not supported" in listing.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no command"),
        (("no-such-program",), "is not a program on PATH"),
        (("--capability", "x", "true"), "give it as 9.0"),
        (("--memory", "inf", "true"), "--memory inf: give the GiB"),
        (("--memory", "nan", "true"), "--memory nan: give the GiB"),
        (("--memory=-1", "true"), "--memory -1.0: give the GiB"),
        (("--devices", "0", "true"), "--devices 0: give a number"),
    ],
)
def test_bad_commands(arguments: tuple[str, ...], message: str) -> None:
    result = run_command(*arguments)
    assert result.returncode == 2 and message in result.stderr


def test_a_command_that_cannot_be_executed_is_named(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("echo\n")
    script.chmod(0o700)
    result = run_command(str(script))
    assert result.returncode == 2 and f"{script} cannot be executed (Exec format error)" in result.stderr
    assert "Traceback" not in result.stderr


def test_variables_of_the_environment_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", "")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/somewhere")
    variables = PHANTOM.environment()
    path = Path(variables["LD_PRELOAD"])
    assert path.is_file() and variables["LD_LIBRARY_PATH"] == f"{path.parent}{os.pathsep}/somewhere"
