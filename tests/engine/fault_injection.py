"""Rollout managers on two real engines, with faults injected at a given answer."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from slime_like.config.schema.faults import HealthConfig
from slime_like.config.schema.resolved import EngineSpec, TransportSpec
from slime_like.config.schema.rollout import EvalConfig, RewardConfig, RolloutConfig
from slime_like.config.schema.run import LoopConfig
from slime_like.interfaces import Bucket, Completion, Sampling
from slime_like.rollout.engine import processes
from slime_like.rollout.engine.client import EngineClient
from slime_like.rollout.engine.server import EngineServer
from slime_like.rollout.manager import ManagerSpec, RolloutManager
from slime_like.types import I32
from slime_like.util.deadline import Deadline
from slime_like.weight_sync.broadcast import BroadcastSender
from slime_like.weight_sync.tensor import TensorSender
from tests.data.character_tokenizer import characters
from tests.data.sources import source, write
from tests.engine.conftest import ADMIN_KEY, Models
from tests.engine.forked_engines import ForkedEngineServer
from tests.engine.test_weights import TensorSource

HOST = "127.0.0.1"
# An engine works on one group at a time and queues one more. At its first or second answer it therefore still has
# groups to answer, however fast it decodes and however late this process receives the answer.
GROUPS, SAMPLES, TOKENS, MAX_GROUPS_IN_FLIGHT = 12, 4, 16, 2
AnswerCallback = Callable[[str], None]
_answer_callbacks: list[AnswerCallback] = []  # called with the engine's name at each answer


def at_answer(name: str, number: int, action: Callable[[], object]) -> None:
    """Call ``action`` at the ``number``-th answer of an engine, while the engine works on other groups."""
    answers_seen: list[str] = []

    def count(engine: str) -> None:
        answers_seen.extend([engine] if engine == name else [])
        if len(answers_seen) == number:
            answers_seen.append("")
            action()

    _answer_callbacks[:] = [*_answer_callbacks, count]


def at_first_answer(action: Callable[[str], object]) -> None:
    """Call ``action`` with the engine's name at the first answer of any engine."""
    first_engines: list[str] = []

    def run_action(engine: str) -> None:
        if not first_engines:
            first_engines.append(engine)
            action(engine)

    _answer_callbacks[:] = [*_answer_callbacks, run_action]


def record_answers() -> list[str]:
    """Return a list to which the name of the engine is appended at each later answer."""
    engine_names: list[str] = []
    _answer_callbacks.append(engine_names.append)
    return engine_names


def clear_callbacks() -> None:
    """Remove all callbacks, so that no further fault is injected."""
    _answer_callbacks.clear()


class ObservedClient(EngineClient):
    """Client that runs the answer callbacks, counts waiting health checks, and limits the groups in flight."""

    def __init__(self, url: str, spec: EngineSpec, name: str) -> None:
        super().__init__(
            url, admin_key=ADMIN_KEY, name=name, tp=spec.tp, num_dp_ranks=spec.dp_attention, deadline_s=120
        )
        self.num_waiting_checks = 0
        self._room = asyncio.Semaphore(MAX_GROUPS_IN_FLIGHT)

    async def health(self, seconds: float | None = None, *, decodes: bool = False) -> bool:
        self.num_waiting_checks += 1
        try:
            return await super().health(seconds, decodes=decodes)
        finally:
            self.num_waiting_checks -= 1

    async def extend(
        self,
        token_ids: Sequence[I32],
        seeds: Sequence[int],
        max_new_tokens: Sequence[int],
        sampling: Sampling,
        *,
        for_training: bool = True,
        dp_rank: int | None = None,
    ) -> list[Completion]:
        async with self._room:
            completions = await super().extend(
                token_ids, seeds, max_new_tokens, sampling, for_training=for_training, dp_rank=dp_rank
            )
            for callback in _answer_callbacks:
                callback(self.name)
        return completions


class InterruptedSource(TensorSource):
    """Weight source that calls ``action`` between its first two buckets."""

    def __init__(self, tensors: dict[str, torch.Tensor], action: Callable[[], object]) -> None:
        super().__init__(tensors)
        self._action = action

    def buckets(self, max_bytes: int) -> Iterator[Bucket]:
        for number, bucket in enumerate(super().buckets(max_bytes)):
            if number == 1:
                self._action()
            yield bucket


class LocalSupervisor:
    """Supervisor of an engine whose server runs under this process."""

    def __init__(self, spec: EngineSpec, name: str) -> None:
        self.spec, self._name = spec, name
        self.server = self._start()
        self.client = EngineClient("http://nowhere", admin_key=ADMIN_KEY, name=name)

    def _start(self) -> EngineServer:
        server = ForkedEngineServer(self.spec, admin_key=ADMIN_KEY)
        server.start()
        return server

    def connect(self) -> None:
        """Wait until the server is ready and create its client."""
        self.server.wait_ready()
        self.client = ObservedClient(self.server.url, self.spec, self._name)

    async def restart(self) -> tuple[EngineClient, str]:
        cause = await asyncio.to_thread(self.server.exit_summary)
        self.server.stop()
        self.server = self._start()
        await asyncio.to_thread(self.connect)
        return self.client, cause

    async def stop_server(self) -> None:
        self.server.stop()

    async def stopped_pids(self) -> tuple[int, ...]:
        return processes.stopped_pids(self.server.pid)

    def kill_scheduler(self) -> None:
        """Kill the last scheduler process only; the HTTP server may still answer."""
        *_, scheduler = processes.pids_of_part(self.server.pid, "scheduler")
        os.kill(scheduler, signal.SIGKILL)

    def send_signal(self, number: signal.Signals) -> None:
        os.killpg(self.server.pid, number)


class EnginePair:
    """Two engines and the managers that use them. The second engine has ``dp_attention`` data-parallel ranks."""

    def __init__(self, models: Models, folder: Path, dp_attention: int = 1, **engine: Any) -> None:
        self.models, self.folder, self.version = models, folder, 0
        characters().save_pretrained(folder / "tokenizer")
        self._data = write(folder / "train.jsonl", [{"prompt": f"{i}+1=", "label": str(i)} for i in range(100)])
        spec = EngineSpec(
            model_path=str(models.paths["A"]),
            device="cpu",
            dtype="float32",
            tp=1,
            context_length=512,
            seed=0,
            log_path="",
            start_deadline_s=180,
            max_running_requests=SAMPLES,
            sglang={"max_total_tokens": 4096},
            **engine,
        )
        specs = (spec, replace(spec, tp=dp_attention, dp_attention=dp_attention))
        self.supervisors = [
            LocalSupervisor(replace(spec, log_path=str(folder / f"{i}.log")), f"engine {i}")
            for i, spec in enumerate(specs)
        ]
        self.loop = asyncio.new_event_loop()
        self._managers: list[RolloutManager] = []

    def supervisor(self, name: str) -> LocalSupervisor:
        """Return the supervisor of an engine."""
        return next(supervisor for supervisor in self.supervisors if supervisor.client.name == name)

    def manager(self, engines: int = 2, **health: Any) -> RolloutManager:
        """Return a new manager of rollouts of ``GROUPS`` groups on the first ``engines`` engines."""
        settings: dict[str, Any] = {"interval_s": 0.5, "timeout_s": 30.0, "first_wait_s": 0.0} | health
        spec = ManagerSpec(
            rollout=RolloutConfig(
                batch_size=GROUPS,
                n_samples_per_prompt=SAMPLES,
                max_response_len=TOKENS,
            ),
            reward=RewardConfig(name="exact", workers=1),
            evaluation=EvalConfig(),
            loop=LoopConfig(num_rollout=9),
            health=HealthConfig(**settings),
            tokenizer_path=str(self.folder / "tokenizer"),
            max_context_len=500,
            stop_token_ids=(),
            temperature=1.0,
            seed=0,
            probe_sequences=2,
            first_rollout=0,
            deterministic=False,
            receives_pushes=True,
            chat_template_kwargs={},
        )
        manager = RolloutManager(spec, source(self._data), {}, self.supervisors[:engines])
        self._managers.append(manager)
        return manager

    def stop_managers(self) -> None:
        """Stop all managers; a manager of a failed test would restart engines during the next test."""
        for supervisor in self.supervisors:
            with contextlib.suppress(ProcessLookupError):
                supervisor.send_signal(signal.SIGCONT)
        managers, self._managers = self._managers, []

        async def stop() -> None:
            ends = await asyncio.gather(*(manager.stop() for manager in managers), return_exceptions=True)
            assert not [end for end in ends if end is not None], ends

        self.loop.run_until_complete(stop())

    async def send(
        self, names: Sequence[str], model: str, *, broadcast: bool = False, action: Callable[[], object] = lambda: None
    ) -> None:
        """Send the weights of a push over new connections and call ``action`` between the first two buckets."""
        engines = [supervisor for supervisor in self.supervisors if supervisor.client.name in names]
        clients = [
            EngineClient(e.server.url, admin_key=ADMIN_KEY, name=e.client.name, tp=e.spec.tp, deadline_s=120)
            for e in engines
        ]
        name, make = ("broadcast", BroadcastSender) if broadcast else ("tensor", TensorSender)
        sender = make(clients, transport=TransportSpec(name, "gloo", 1 << 16, 60.0), group_name="faults", host=HOST)
        try:
            await sender.send(InterruptedSource(self.models.tensors(model), action))
        finally:
            await sender.close()

    async def begin_push(self, manager: RolloutManager) -> tuple[str, ...]:
        """Begin a push; return the names of the engines that take part."""
        return tuple(address.name for address in await manager.begin_push())

    async def push(self, manager: RolloutManager, model: str) -> tuple[str, ...]:
        """Push completely; return the names of the engines that take part."""
        names = await self.begin_push(manager)
        await self.send(names, model)
        self.version += 1
        await manager.commit_push(self.version)
        return names

    def close(self) -> None:
        """Stop both engines."""
        for supervisor in self.supervisors:
            supervisor.server.stop()
        for supervisor in self.supervisors:
            self.loop.run_until_complete(supervisor.client.close())
        self.loop.close()


async def until(condition: Callable[[], object]) -> None:
    """Wait until ``condition()`` is true."""
    deadline = Deadline("test", "faults", 120)
    while not condition():
        deadline.remaining("the rollout manager")
        await asyncio.sleep(0.05)
