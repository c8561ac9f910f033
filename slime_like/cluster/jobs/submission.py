"""A command line of ``train.py``, or a request to a run, as a job; recognisable secrets are refused."""

from __future__ import annotations

import os
import re
import secrets
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from slime_like.cluster.jobs.job import CODE, FORMAT, MARK, PACKAGE, PYTHON, RUN_DIR, RUN_NAME, USER
from slime_like.cluster.jobs.layout import JOINED
from slime_like.cluster.jobs.server import JobRequest
from slime_like.config.schema.root import TrainConfig
from slime_like.errors import ConfigError, DataError

STOP_VARIABLE, STOP_S = "RAY_JOB_STOP_WAIT_TIME_S", 900  # between SIGTERM, on which a run saves, and SIGKILL; Ray: 3 s
WORKING_DIR = "${RAY_RUNTIME_ENV_CREATE_WORKING_DIR}"  # Ray replaces it with the folder of the unpacked code
SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL", re.IGNORECASE)
PASSWORD = re.compile(r"://[^/?#\s@]*:[^/?#\s]*@")  # in a URL
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class NodePaths:
    """Code on the nodes: the folder of a checkout, and the Python of its environment."""

    code: str
    python: str
    package: str | None = None  # URI of uploaded code, which runs instead of the code in ``code``


@dataclass(frozen=True, slots=True)
class Submission:
    """A checked command line of ``train.py``, and the code on the nodes that runs it."""

    arguments: tuple[str, ...]
    paths: NodePaths
    run_name: str
    run_dir: str  # absolute, on the nodes
    environment: Mapping[str, str] = field(default_factory=dict[str, str])


def make_submission(
    arguments: Sequence[str], cfg: TrainConfig, paths: NodePaths, environment: Mapping[str, str]
) -> Submission:
    """Return the submission of ``arguments``, whose loaded config is ``cfg``.

    Raises ``ConfigError`` as ``check_no_secrets`` does, or if ``run.dir`` is relative and the code is uploaded: the
    folder of uploaded code is removed with the cluster.
    """
    check_no_secrets(arguments, environment)
    run_dir = PurePosixPath(cfg.run.dir)
    if not run_dir.is_absolute():
        if paths.package is not None:
            raise ConfigError(
                f"run.dir={cfg.run.dir!r} with --upload: it would be within Ray's copy of the code, which is removed with the "
                "cluster; give an absolute path on a disk of the head or a shared file system"
            )
        run_dir = PurePosixPath(paths.code) / run_dir
    return Submission(tuple(arguments), paths, cfg.run.name, str(run_dir), environment)


def check_no_secrets(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Refuse recognisable secrets, because every user of the cluster can read the entrypoints and environments of jobs.

    Raises ``ConfigError`` if an argument or a variable contains a URL with a password, or if the name of a variable is
    that of a secret (``SECRET_NAME``) or malformed. Other secrets are not detected.
    """
    for name in environment:
        if not VARIABLE.fullmatch(name):
            raise ConfigError(f"--env {name!r} is not a name of an environment variable: write --env NAME=VALUE")
        if SECRET_NAME.search(name):
            raise ConfigError(
                f"--env {name} would be readable in the job's description: set it in the environment of `ray start` on the "
                "nodes, of sbatch, or by a Kubernetes secret (docs/cluster_jobs.md)"
            )
    for argument in (*arguments, *(f"--env {name}={value}" for name, value in environment.items())):
        if match := PASSWORD.search(argument):
            source = argument[: match.start()].rpartition("=")[0] or "an argument"
            raise ConfigError(
                f"{source} contains a URL with a password, which every user of the cluster could read: remove it"
            )


def job_request(submission: Submission) -> JobRequest:
    """Return the request that submits ``submission`` under a new job id."""
    # The last value of a key wins, so ``JOINED`` replaces the address in a recipe.
    words = ("train.py", *submission.arguments, JOINED)
    metadata = {RUN_NAME: submission.run_name, RUN_DIR: submission.run_dir}
    variables = {STOP_VARIABLE: str(STOP_S), **submission.environment}
    return _request(submission.run_name, submission.paths, words, metadata, variables)


def control_request(job_id: str, metadata: Mapping[str, str], request: str, wait_s: float) -> JobRequest:
    """Return a helper job that sends ``request`` through a run's control files and waits at most ``wait_s`` for the reply.

    ``job_id`` and ``metadata`` are those of the run's job. Raises ``DataError`` if ``metadata`` lacks the run's folder, code or
    Python.
    """
    try:
        paths, run_dir = NodePaths(metadata[CODE], metadata[PYTHON], metadata.get(PACKAGE)), metadata[RUN_DIR]
    except KeyError as error:
        raise DataError(f"job {job_id} has no {error} in its metadata: it is not a run of scripts/submit.py") from error
    words = ("scripts/control.py", run_dir, request, "--wait", f"{wait_s:.0f}")
    return _request(f"{request}-{job_id}", paths, words, {}, {})


def _request(
    name: str, paths: NodePaths, words: Sequence[str], metadata: Mapping[str, str], variables: Mapping[str, str]
) -> JobRequest:
    """Return a job that runs Python with ``words`` in the code's folder. Python replaces the shell, so signals reach it."""
    command = f"exec {shlex.join([paths.python, *words])}"
    job_metadata = {
        MARK: FORMAT,
        USER: os.environ.get("USER") or str(os.getuid()),
        CODE: paths.code,
        PYTHON: paths.python,
    }
    if paths.package is None:
        entrypoint, runtime_env = f"cd {shlex.quote(paths.code)} && {command}", {"env_vars": dict(variables)}
    else:
        entrypoint, job_metadata = command, job_metadata | {PACKAGE: paths.package}
        import_path = {"PYTHONPATH": f"{WORKING_DIR}:{WORKING_DIR}/plugins"}
        runtime_env = {"env_vars": {**variables, **import_path}, "working_dir": paths.package}
    return JobRequest(_new_id(name), entrypoint, {**job_metadata, **metadata}, runtime_env)


def _new_id(name: str) -> str:
    """Return a new job id that begins with at most 80 characters of ``name`` or, if none of them is valid, with "run".

    Each sequence of characters that an id cannot contain becomes one "-".
    """
    stem = re.sub(r"[^A-Za-z0-9_.-]+", "-", name)[:80].strip("-.") or "run"
    return f"{stem}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(2)}"
