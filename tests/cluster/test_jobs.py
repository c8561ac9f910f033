"""Jobs of a Ray cluster against a server in the test's process; ``tests/e2e/test_jobs.py`` uses a cluster."""

from __future__ import annotations

import asyncio
import io
import re
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest
from aiohttp import test_utils, web

from scripts import submit  # pyright: ignore[reportAttributeAccessIssue]  scripts is not a package
from slime_like.cluster.jobs import follow as following
from slime_like.cluster.jobs.address import ServerAddress, read_token, server_address
from slime_like.cluster.jobs.code_archive import make_package
from slime_like.cluster.jobs.job import read_job
from slime_like.cluster.jobs.server import JobServer
from slime_like.cluster.jobs.stopping import stop_job
from slime_like.cluster.jobs.submission import (
    NodePaths,
    check_no_secrets,
    control_request,
    job_request,
    make_submission,
)
from slime_like.config.load.loader import load_config
from slime_like.errors import (
    ConfigError,
    DataError,
    MissingResources,
    ProcessLost,
    SlimeLikeError,
    WorkerError,
)
from tests.cluster.job_server import OWN, ServerState, job_server

PATHS = NodePaths("/opt/slime like", "/opt/slime like/.venv/bin/python")
QUICK = ["+recipe=quickstart"]
TWO_NODES = ["placement.actor_num_nodes=2", "placement.actor_num_gpus_per_node=1"]


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "RETRY_S", 0.01)
    monkeypatch.setattr(following, "POLL_S", 0.01)


# ---- address ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "text",
    [
        "127.0.0.1:8265",
        "ray://h:10001",
        "http://",
        "http://h:1/jobs",
        "http://h:99999",
        "http://h?a=b",
        "http://[::1:8265",
        "module.name://h",
    ],
)
def test_an_address_that_is_not_a_job_server_names_its_source(text: str) -> None:
    with pytest.raises(
        ConfigError, match=r"^--address='.*' is not the address of a job server: write http://HOST:PORT"
    ):
        server_address(text, {})
    with pytest.raises(ConfigError, match=r"^RAY_API_SERVER_ADDRESS="):
        server_address(None, {"RAY_API_SERVER_ADDRESS": text})


@pytest.mark.parametrize("text", ["http://me:hunter2@h:1", "http://me:hunter2@[::1:8265", "ray://me:hunter2@h:10001"])
def test_a_password_in_an_address_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(ConfigError, match="user or password") as error:
        server_address(text, {})
    assert "hunter2" not in str(error.value)


def test_the_token_is_read_as_ray_reads_it_and_not_shown(tmp_path: Path) -> None:
    file = tmp_path / ".ray" / "auth_token"
    file.parent.mkdir()
    file.write_text("of the file\n")
    home = {"HOME": str(tmp_path)}
    assert read_token(home) == "of the file"
    assert read_token({"HOME": str(tmp_path / "other")}) is None
    token_file = tmp_path / "other_token"
    token_file.write_text("of the path")
    assert read_token({**home, "RAY_AUTH_TOKEN_PATH": str(token_file)}) == "of the path"
    assert (
        read_token({**home, "RAY_AUTH_TOKEN_PATH": str(token_file), "RAY_AUTH_TOKEN": "of the variable"})
        == "of the variable"
    )
    with pytest.raises(ConfigError, match="RAY_AUTH_TOKEN_PATH='/nowhere' cannot be read"):
        read_token({"RAY_AUTH_TOKEN_PATH": "/nowhere"})
    address = server_address("http://127.0.0.1:1", {"RAY_AUTH_TOKEN": "hidden"})
    assert "hidden" not in repr(address) and address.is_local and not ServerAddress("http://10.0.0.1:1").is_local


# ---- client ----------------------------------------------------------------------------------------------------------
def test_a_wrong_token_and_a_missing_server_are_explained() -> None:
    async def wrong_token() -> None:
        async with job_server(ServerState(), token="wrong") as server:
            await server.check()
            await server.jobs()

    async def no_server() -> None:
        async with JobServer(ServerAddress("http://127.0.0.1:9")) as server:
            await server.check()

    with pytest.raises(ConfigError, match=r"refuses the token \(401\): set RAY_AUTH_TOKEN"):
        asyncio.run(wrong_token())
    with pytest.raises(ConfigError, match=r"no job server answers .*: start the cluster's head with a dashboard"):
        asyncio.run(no_server())


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        (web.Response(status=404, text="no path"), r" \(http://\S+ answered 404: no path\)"),
        (web.Response(text="<html>"), ""),
        (web.json_response({"version": 1}), ""),
        (web.json_response(3), ""),
    ],
)
def test_a_server_that_is_no_job_server_is_named(reply: web.Response, answer: str) -> None:
    with pytest.raises(ConfigError, match=rf"is not a Ray cluster's job server{answer}: correct --address or "):
        asyncio.run(check_version(reply))


@pytest.mark.parametrize("status", [500, 502, 503])
def test_a_job_server_that_fails_is_not_called_another_server(status: int) -> None:
    with pytest.raises(WorkerError, match=rf"^http://\S+/api/version answered {status}: starting$"):
        asyncio.run(check_version(web.Response(status=status, text="starting")))


async def check_version(reply: web.Response) -> None:
    """Check a server that answers the request for its version with ``reply``."""

    async def version(_: web.Request) -> web.Response:
        return reply

    app = web.Application()
    app.add_routes([web.get("/api/version", version)])
    async with (
        test_utils.TestServer(app) as server,
        JobServer(ServerAddress(f"http://{server.host}:{server.port}")) as client,
    ):
        await client.check()


@pytest.mark.parametrize("job_id", ["missing", "../packages", "a b", ".", ""])
def test_an_unknown_job_names_the_list(job_id: str) -> None:
    async def ask() -> None:
        async with job_server(ServerState()) as server:
            await server.job(job_id)

    with pytest.raises(DataError, match=r"scripts/submit.py list"):
        asyncio.run(ask())


@pytest.mark.parametrize(
    "entry", [{}, {"submission_id": "a"}, {"submission_id": "a", "status": "FAILED", "driver_exit_code": "x"}, 3]
)
def test_a_malformed_job_is_reported(entry: Any) -> None:
    with pytest.raises(WorkerError, match="cannot be read"):
        read_job(entry)


@pytest.mark.parametrize(
    ("status", "code", "outcome", "result"),
    [
        ("SUCCEEDED", 0, "SUCCEEDED", 0),
        ("FAILED", 2, "FAILED", 2),
        ("FAILED", 130, "STOPPED", 130),
        ("FAILED", None, "FAILED", 1),
        ("FAILED", -9, "FAILED", 1),
        ("STOPPED", None, "STOPPED", 130),
    ],
)
def test_the_exit_code_is_that_of_train_py(status: str, code: int | None, outcome: str, result: int) -> None:
    job = read_job({"submission_id": "a", "status": status, "driver_exit_code": code, "metadata": None})
    assert job is not None and (job.outcome, job.code, job.has_ended, job.is_ours) == (outcome, result, True, False)


# ---- submission ------------------------------------------------------------------------------------------------------
def test_a_job_runs_train_py_in_the_folder_of_the_code() -> None:
    arguments = (*QUICK, 'run.name=it\'s "new"', "optim.lr=1e-5")
    cfg = load_config([*QUICK, "run.name=x"], files=False, machine=False)
    request = job_request(make_submission(arguments, cfg, PATHS, {"NCCL_DEBUG": "INFO"}))
    script = f"{request.entrypoint.replace('exec', 'printf %s\\\\n', 1).replace('cd ', 'cd / && : ', 1)}"
    words = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout.splitlines()
    assert words == [PATHS.python, "train.py", *arguments, "placement.ray_address=auto"]
    assert request.entrypoint.startswith("cd '/opt/slime like' && exec ")
    assert request.runtime_env == {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "900", "NCCL_DEBUG": "INFO"}}
    assert request.metadata["run_dir"] == "/opt/slime like/runs/x"
    assert re.fullmatch(r"x-\d{8}-\d{6}-[0-9a-f]{4}", request.submission_id)


def test_uploaded_code_takes_the_place_of_the_nodes_code_and_needs_an_absolute_run_dir() -> None:
    paths = NodePaths(PATHS.code, PATHS.python, "gcs://_ray_pkg_a.zip")
    cfg = load_config(QUICK, files=False, machine=False)
    with pytest.raises(ConfigError, match=r"run.dir='runs/quickstart' with --upload: .* give an absolute path"):
        make_submission(QUICK, cfg, paths, {})
    cfg = load_config([*QUICK, "run.dir=/shared/a"], files=False, machine=False)
    request = job_request(make_submission([*QUICK, "run.dir=/shared/a"], cfg, paths, {}))
    assert request.entrypoint.startswith("exec '/opt/slime like/.venv/bin/python' train.py")
    assert request.runtime_env["working_dir"] == "gcs://_ray_pkg_a.zip"
    stop = control_request("a", request.metadata, "stop", 60)
    assert stop.runtime_env["working_dir"] == "gcs://_ray_pkg_a.zip", "the same code sends requests to the run"
    assert stop.entrypoint.endswith("scripts/control.py /shared/a stop --wait 60")


@pytest.mark.parametrize("name", ["WANDB_API_KEY", "HF_TOKEN", "my_password", "AWS_SECRET_ACCESS"])
def test_secrets_are_refused_and_not_repeated(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--env {name} would be readable") as error:
        check_no_secrets([], {name: "hunter2"})
    assert "hunter2" not in str(error.value)


URL = "http://me:hunter2@h:1/score"


@pytest.mark.parametrize(
    ("arguments", "environment", "source"),
    [
        ([f"reward.remote_url={URL}"], {}, "reward.remote_url"),
        (["--rm-url", f"'{URL}?a=b'"], {}, "an argument"),
        ([], {"https_proxy": URL}, "--env https_proxy"),
    ],
)
def test_urls_with_a_password_are_refused_and_not_repeated(
    arguments: list[str], environment: dict[str, str], source: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{source} contains a URL with a password") as error:
        check_no_secrets(arguments, environment)
    assert "hunter2" not in str(error.value)
    check_no_secrets(
        ["reward.remote_url=http://h:1/score"], {"NCCL_SOCKET_IFNAME": "eth0", "https_proxy": "http://h:1/a@b"}
    )


def test_a_package_has_the_codes_files_and_a_name_of_its_content(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    for path in ("slime_like/errors.py", "plugins/b.py", "runs/secret.txt", "slime_like/ignored.log", "train.py"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(path)
    (tmp_path / ".gitignore").write_text("*.log\n")
    (tmp_path / "slime_like" / "link.py").symlink_to("/etc/passwd")
    first = make_package(tmp_path)
    with zipfile.ZipFile(io.BytesIO(first.content)) as archive:
        assert archive.namelist() == ["plugins/b.py", "slime_like/errors.py", "train.py"]
    (tmp_path / "train.py").touch()
    assert make_package(tmp_path) == first
    (tmp_path / "train.py").write_text("new")
    assert make_package(tmp_path).name != first.name
    with pytest.raises(ConfigError, match="git cannot list the files"):
        make_package(tmp_path / "missing")


# ---- stopping --------------------------------------------------------------------------------------------------------
def stop(state: ServerState, job_id: str, *, at_once: bool = False) -> int:
    async def run() -> int:
        async with job_server(state) as server:
            return (await stop_job(server, job_id, wait_s=5, at_once=at_once)).code

    return asyncio.run(run())


def test_a_run_is_stopped_through_its_control_files_and_the_helper_is_removed() -> None:
    state = ServerState()
    state.add("a", "RUNNING")
    assert stop(state, "a") == 130
    assert [job["entrypoint"] for job in state.submitted] == [
        "cd /code && exec /code/.venv/bin/python scripts/control.py /runs/a stop --wait 5"
    ]
    assert state.removed == [state.submitted[0]["submission_id"]] and not state.stopped


def test_a_run_that_does_not_take_the_request_is_not_killed() -> None:
    state = ServerState(helper_ends_run=False)
    state.add("a", "RUNNING")
    with pytest.raises(
        WorkerError, match=r"did not confirm the request to stop: DataError: no run is active here; .* stop a --now`"
    ):
        stop(state, "a")
    assert not state.stopped and state.jobs["a"]["status"] == "RUNNING"
    assert len(state.removed) == 1
    assert stop(state, "a", at_once=True) == 130 and state.stopped == ["a"]


def test_only_own_jobs_are_stopped() -> None:
    state = ServerState()
    state.add("theirs", "RUNNING", metadata={"name": "theirs"})
    for at_once in (False, True):
        with pytest.raises(DataError, match="stops only jobs that it submitted"):
            stop(state, "theirs", at_once=at_once)
    assert not state.submitted and not state.stopped
    state.add("ended", "FAILED", 1)
    assert stop(state, "ended") == 1 and not state.submitted


# ---- command ---------------------------------------------------------------------------------------------------------
def command(state: ServerState, monkeypatch: pytest.MonkeyPatch, *argv: str) -> int:
    """Return the exit code of scripts/submit.py with ``argv``."""

    async def run() -> int:
        async with job_server(state) as server:
            monkeypatch.setenv("RAY_API_SERVER_ADDRESS", server.address.url)
            monkeypatch.setenv("RAY_AUTH_TOKEN", "a token")
            args = submit._parser().parse_args(list(argv))  # pyright: ignore[reportPrivateUsage]
            return await submit._dispatch(args)  # pyright: ignore[reportPrivateUsage]

    return asyncio.run(run())


def test_a_cluster_without_a_token_is_refused_unless_accepted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    resources = {"CPU": 8.0, "memory": 2.0**36}
    node = {"state": "ALIVE", "node_id": "a", "node_ip": "10.0.0.1", "resources_total": resources}
    state = ServerState(mode="disabled", nodes=[node, {**node, "state": "DEAD"}])
    with pytest.raises(ConfigError, match="requires no token, so anyone"):
        command(state, monkeypatch, "run", *QUICK)
    assert not state.submitted
    assert command(state, monkeypatch, "run", "--open-cluster", "--detach", *QUICK, "--lr", "1e-5") == 0
    assert "--lr 1e-5 placement.ray_address=auto" in state.submitted[0]["entrypoint"]
    assert "cluster: 1 node, 0 GPUs, 8 CPUs" in capsys.readouterr().out
    two_nodes = ("--open-cluster", "--detach", *QUICK, *TWO_NODES)
    with pytest.raises(MissingResources, match="pass --grows"):
        command(state, monkeypatch, "run", *two_nodes)
    assert command(state, monkeypatch, "run", "--grows", *two_nodes) == 0 and len(state.submitted) == 2


def test_list_has_only_runs_of_this_project(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    state = ServerState()
    state.add("a", "FAILED", 130, {**OWN, "run_dir": "/runs/\x1b[31m"})
    state.add("helper", "SUCCEEDED", 0, {"slime_like": "1"})
    state.add("theirs", "RUNNING", metadata={})
    assert command(state, monkeypatch, "list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 and lines[0].startswith("a  STOPPED (exit code 130)  ") and "\x1b" not in lines[0]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("run", "--env", "A", *QUICK), "--env 'A' has no value"),
        (("run", "--env", "1A=b", *QUICK), "--env '1A' is not a name"),
        (("stop", "a", "--wait", "-1"), "--wait -1"),
    ],
)
def test_bad_options_name_the_option(argv: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SlimeLikeError, match=message):
        command(ServerState(), monkeypatch, *argv)


def test_a_missing_python_on_the_head_names_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    job = read_job({"submission_id": "a", "status": "FAILED", "driver_exit_code": 127, "metadata": OWN})
    assert job is not None and submit._report(job) == 127  # pyright: ignore[reportPrivateUsage]
    assert "no Python at /code/.venv/bin/python: correct --code or --python" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("nodes", "--wait-for", "2"), "interrupted\n"),
        (("list",), "interrupted\n"),
        (("run", *QUICK), "interrupted; a job that was submitted keeps running (scripts/submit.py list)\n"),
        (("follow", "a"), "stopped following; the job keeps running (scripts/submit.py list)\n"),
        (("stop", "a"), "stopped waiting; a stop request that was sent remains in effect (scripts/submit.py list)\n"),
    ],
)
def test_ctrl_c_says_only_what_is_true_of_the_command(
    argv: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(submit, "_dispatch", interrupted)
    assert submit.main([*argv]) == 130
    assert capsys.readouterr().err == message


def test_errors_are_printed_with_their_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert submit.main(["--address", "nonsense", "list"]) == 2
    assert capsys.readouterr().err.startswith("ConfigError: --address='nonsense'")
    assert issubclass(ProcessLost, SlimeLikeError)
