"""SGLang HTTP server in a child process that leads its own process group.

No other module of slime_like imports sglang; the SGLang plugins do too.

The parent sends the child one line of JSON on stdin (``ps`` would show a key on the command line) and keeps the pipe
open. When the parent ends, the child reads end-of-file and kills its group. ``PR_SET_PDEATHSIG`` would also fire when
only the *thread* that started the child ends, so only SGLang's own workers use it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from slime_like.config.schema.resolved import EngineSpec
from slime_like.errors import EngineError
from slime_like.printable import hide_in_logs
from slime_like.rollout.engine import processes
from slime_like.rollout.engine.model_config import merge_overrides, other_models, override_args
from slime_like.util.deadline import Deadline
from slime_like.util.imports import heavy_imports
from slime_like.util.ports import PortLease, interface_environment

POLL_S = 0.05
ANSWER_S = 5.0  # limit for one health request to a starting server
DYING_S = 8.0  # on a GPU SGLang waits five seconds before it exits
LAST_WORDS_S = 1.0
LOOPBACK = "127.0.0.1"
SGLANG_PLUGINS = (
    "SLIME_LIKE_SGLANG"  # comma-separated plugins of this project for the engine (slime_like_plugins.sglang_hooks)
)
# Spin count of libgomp's threads at the end of a parallel region before they sleep: about 0.03 ms. Decoding opens hundreds
# of regions per token, a few microseconds apart; waking a thread for each costs more than two threads gain. With a
# higher count they would occupy the core that the scheduler, the detokenizer and the server share.
SPIN_COUNT = "2000"
SPIN = "SLIME_LIKE_ENGINE_SPIN_COUNT"  # overrides SPIN_COUNT, to measure it (benchmarks/run.py spin)
THREADS = "SLIME_LIKE_ENGINE_THREADS"  # the number of threads of a model on a CPU
CPU_KERNELS = "SLIME_LIKE_CPU_KERNELS"
DECODE_LINE = "slime_like decodes with "
# Without these, a server whose worker died waits five seconds for GPU state dumps before it exits.
NO_CRASH_DUMPS = {"SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0"}
MODEL_OVERRIDES = "json_model_override_args"


@dataclass(frozen=True, slots=True)
class EngineLaunch:
    """Message from the parent to the child."""

    spec: EngineSpec
    admin_key: str
    host: str
    port: int


class EngineServer:
    """Starts, monitors and stops one engine. Call ``wait_ready`` before the first request."""

    def __init__(self, spec: EngineSpec, *, admin_key: str, host: str = LOOPBACK) -> None:
        self._spec = spec
        self._admin_key = admin_key
        self._host = host
        self._process: subprocess.Popen[bytes] | None = None
        self._lease: PortLease | None = None
        self._scratch: str | None = None
        self.url = ""
        self.segments: frozenset[Path] = frozenset()  # named shared memory of its processes seen so far

    @property
    def pid(self) -> int:
        """Process id, which is also the id of the process group of everything that the engine starts."""
        if self._process is None:
            raise EngineError("engine was not started: call start() first")
        return self._process.pid

    def start(self) -> None:
        """Spawn the server and return without waiting for it."""
        if self._process is not None:
            raise EngineError(f"engine at {self.url} has already been started; create a new EngineServer")
        self._lease = PortLease(self._host)
        self.url = f"http://{self._host}:{self._lease.port}"
        self._scratch = tempfile.mkdtemp(prefix=processes.SCRATCH_PREFIX)
        launch = EngineLaunch(self._spec, self._admin_key, self._host, self._lease.port)
        Path(self._spec.log_path).parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(self._spec.log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "slime_like.rollout.engine.server"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=child_environment(self._spec, self._scratch, self._host),
                start_new_session=True,
            )
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(launch)).encode() + b"\n")
        self._process.stdin.flush()

    def wait_ready(self) -> None:
        """Block until the server answers.

        Raises ``EngineError`` with exit code and last log lines if the server died, ``DeadlineExceeded`` after
        ``spec.start_deadline_s``.
        """
        deadline = Deadline("rollout", "engine start", self._spec.start_deadline_s)
        subject = f"engine at {self.url} (log: {self._spec.log_path})"
        while not self._answers(min(ANSWER_S, deadline.remaining(subject))):
            if not self.alive():
                raise EngineError(f"engine did not start: {self.cause_of_death()}")
            time.sleep(POLL_S)
        self.segments = processes.mapped_segments(self.pid)

    def decodes_with(self) -> str:
        """Return the decoding method of a CPU engine, as its log states it; empty on a GPU and before it is ready."""
        try:
            matches = re.findall(rf"{DECODE_LINE}(.*)", Path(self._spec.log_path).read_text(errors="replace"))
        except OSError:
            return ""
        return matches[-1] if matches else ""

    def alive(self) -> bool:
        """Return whether the server process is running."""
        return self._process is not None and self._process.poll() is None

    def cause_of_death(self) -> str:
        """Return the exit code, the error in the log and the last log lines; for a running engine, a note that it is alive.

        Waits a few seconds for a dying engine: connections break before the process has ended.
        """
        if self._process is None:
            return f"engine for {self._spec.model_path} was not started"
        try:
            code = self._process.wait(timeout=DYING_S)
        except subprocess.TimeoutExpired:
            return f"engine at {self.url} (pid {self.pid}) is alive"
        lines = processes.last_lines(self._spec.log_path)
        ended = processes.describe_exit(code) + processes.headline(lines)
        return f"engine at {self.url} (pid {self.pid}) {ended}; end of {self._spec.log_path}:\n" + "\n".join(lines)

    def last_words(self) -> str:
        """Return one line on how the server ended, before it is replaced; empty if it does not end within a second."""
        assert self._process is not None, "it was started"
        try:
            ended = processes.describe_exit(self._process.wait(LAST_WORDS_S))
        except subprocess.TimeoutExpired:
            return ""
        return ended + processes.headline(processes.last_lines(self._spec.log_path))

    def stop(self) -> None:
        """Kill the engine's process group and nothing else, and remove its shared memory. Idempotent.

        SIGKILL immediately: SGLang's SIGTERM handler polls every five seconds, and an engine has nothing to save.
        """
        if self._process is not None:
            self.segments |= processes.mapped_segments(self._process.pid)
            with contextlib.suppress(ProcessLookupError):  # the group has already ended
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            processes.remove_segments(self.segments)
            assert self._process.stdin is not None
            self._process.stdin.close()
        if self._lease is not None:
            self._lease.release()
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def _answers(self, seconds: float) -> bool:
        try:
            with urlopen(f"{self.url}/health", timeout=seconds) as reply:
                return reply.status == 200
        except (URLError, OSError, HTTPException):
            return False


def child_environment(spec: EngineSpec, scratch: str, host: str = LOOPBACK) -> dict[str, str]:
    """Return the server's environment: variables read when torch is imported, and a private folder for its sockets."""
    environment = {**interface_environment(host), **os.environ}
    plugins = ["weight_commit", "rollout_sampling"]
    if spec.device == "cpu":
        plugins.insert(0, "cpu")
        if spec.deterministic:
            plugins.append("exact")
            environment["SGLANG_ENABLE_FAST_INPUT_LOGPROBS"] = "0"  # scores by log-softmax, as samples are
        environment |= {"SGLANG_PLATFORM": "slime_like_cpu", "CUDA_VISIBLE_DEVICES": "", CPU_KERNELS: spec.cpu_kernels}
        environment["TORCHDYNAMO_DISABLE"] = "1"  # SGLang compiles a few small functions: seconds, and a C++ compiler
        # Only one thread until the workers start, so that they can be forked; the model's worker then restores this count.
        environment[THREADS] = environment.get("OMP_NUM_THREADS", "1")
        environment["OMP_NUM_THREADS"] = "1"
        environment["GOMP_SPINCOUNT"] = spin_count()
        environment = NO_CRASH_DUMPS | environment
    environment |= {
        SGLANG_PLUGINS: ",".join(plugins),
        "SGLANG_MAMBA_CONV_DTYPE": spec.dtype,  # of a hybrid model's convolution states: bfloat16 rounds a float32 model's
        "TMPDIR": scratch,
        "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"file://{scratch}/rendezvous",  # no port that other users can connect to
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",  # /health answers without decoding a token
        "SGLANG_TIMEOUT_KEEP_ALIVE": "600",  # longer than the client's, which reuses connections
    }
    if os.path.isdir(spec.model_path):
        environment |= {"HF_HUB_OFFLINE": "1", "SGLANG_DISABLED_MODEL_ARCHS": ",".join(other_models(spec.model_path))}
    return environment


def spin_count() -> str:
    """Return the spin count of an engine's threads.

    Raises ``EngineError`` if the setting is not a number, which libgomp would ignore.
    """
    count = os.environ.get(SPIN, SPIN_COUNT)
    if not count.isdecimal():
        raise EngineError(
            f"{SPIN}={count!r} is not a number of spins: set it to a number such as {SPIN_COUNT}, or unset it"
        )
    return count


def server_arguments(launch: EngineLaunch) -> dict[str, Any]:
    """Return SGLang's ServerArgs for an engine with token ids as input and output; ``spec.sglang`` overrides."""
    spec = launch.spec
    arguments: dict[str, Any] = {
        "model_path": spec.model_path,
        "device": spec.device,
        "dtype": spec.dtype,
        "tp_size": spec.tp,
        "context_length": spec.context_length,
        "random_seed": spec.seed,
        "max_running_requests": spec.max_running_requests,
        "skip_tokenizer_init": True,
        "skip_server_warmup": True,
        "weight_version": "0",
        "log_level": "info",
        "log_level_http": "warning",
        "decode_log_interval": 1_000,
    }
    if spec.device == "cpu":
        arguments["disable_overlap_schedule"] = True  # scheduler and model share the core: nothing to overlap
        if spec.deterministic:
            arguments["attention_backend"] = "slime_like_exact"
    elif spec.deterministic:
        arguments["enable_deterministic_inference"] = True
    identity = {
        "host": launch.host,
        "port": launch.port,
        "api_key": launch.admin_key,
        "admin_api_key": launch.admin_key,
        "trust_remote_code": False,
    }
    arguments |= spec.sglang | identity
    if overrides := override_args(spec.model_path):
        user_overrides = json.loads(arguments.get(MODEL_OVERRIDES) or "{}")
        arguments[MODEL_OVERRIDES] = json.dumps(merge_overrides(overrides, user_overrides))
    return arguments


def die_with_parent() -> None:
    """Start a thread that waits for end-of-file on stdin, which means that the parent has ended, then kills this process
    group and removes its files.
    """

    scratch = Path(os.environ.get("TMPDIR", ""))

    def watch() -> None:
        while os.read(0, 4096):  # not sys.stdin: a forked worker would inherit its lock
            pass
        if scratch.name.startswith(processes.SCRATCH_PREFIX):  # created for this engine by EngineServer.start
            shutil.rmtree(scratch, ignore_errors=True)
        processes.remove_segments(processes.mapped_segments(os.getpgid(0)))
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def main() -> None:
    """Entry point of the child: read the launch from stdin, serve until killed."""
    with os.fdopen(os.dup(0), "rb") as stdin:
        fields = json.loads(stdin.readline())
    launch = EngineLaunch(**(fields | {"spec": EngineSpec(**fields["spec"])}))
    die_with_parent()
    hide_in_logs(launch.admin_key)  # SGLang logs all of its arguments
    serve(server_arguments(launch))


def serve(arguments: dict[str, Any]) -> None:
    """Run SGLang in this process. Plugins load first: they add choices against which the arguments are checked."""
    sys.modules["megatron"] = None  # pyright: ignore[reportArgumentType]  SGLang's dumper takes a second to import it
    with heavy_imports():
        plugins: Any = importlib.import_module("sglang.srt.plugins")
        plugins.load_plugins()
        server_args: Any = importlib.import_module("sglang.srt.server_args")
        http_server: Any = importlib.import_module("sglang.srt.entrypoints.http_server")
    http_server.launch_server(server_args.ServerArgs(**arguments))


if __name__ == "__main__":
    main()
