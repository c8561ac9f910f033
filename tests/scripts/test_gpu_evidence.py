"""Parts of ``scripts/gpu_evidence.py``, and the files that ``scripts/gpu_bundle.py`` packs."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from importlib import metadata
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from slime_like.cluster.plan.machine import described_machine
from slime_like.cluster.plan.planner import make_plan
from slime_like.config.load.loader import load_config
from slime_like.util.deadline import scale
from tests.conftest import read_distributions

ROOT = Path(__file__).resolve().parents[2]
gpu_bundle: Any = importlib.import_module("scripts.gpu_bundle")
gpu_evidence: Any = importlib.import_module("scripts.gpu_evidence")
evidence_page: Any = importlib.import_module("scripts.evidence_page")
evidence_parts: Any = importlib.import_module("scripts.evidence_parts")
MEASUREMENTS = ROOT / "docs" / "measurements"


def part_of(*codes: str, name: str = "small") -> Any:
    return gpu_evidence.EvidencePart(name, "Small", tuple(("-c", code) for code in codes), 1, "everything")


def test_every_command_names_a_file_or_module_that_exists() -> None:
    for part in gpu_evidence.PARTS:
        for command in part.commands:
            files = [argument for argument in command if argument.endswith(".py")]
            assert files or command[0] == "-c" or command[:2] == ("-m", "sglang.benchmark.one_batch_server"), command
            assert [file for file in files if not (ROOT / file).is_file()] == []
    assert len({part.name for part in gpu_evidence.PARTS}) == len(gpu_evidence.PARTS)


RUN_PARTS = [part for part in gpu_evidence.PARTS if any(command[0] == gpu_evidence.TRAIN for command in part.commands)]
GPUS = {0: "H100", 80: "H100", 95: "H20", 140: "H200"}  # GPU of a part, by the memory that it needs in GB


@pytest.mark.slow
@pytest.mark.parametrize("part", RUN_PARTS, ids=lambda part: part.name)
def test_every_run_fits_its_machine_and_its_part_names_its_files(part: Any, tmp_path: Path) -> None:
    nodes = f"{part.num_nodes}x" if part.num_nodes > 1 else ""
    machine = described_machine(f"{nodes}{part.num_gpus}x{GPUS[part.gb]}")
    folders: set[str] = set()
    for command in part.commands:
        words = gpu_evidence.arguments_of(command, tmp_path, "auto" if part.num_nodes > 1 else "")
        if command[0] == "-c":
            exec(words[1], {})  # writes a model that the other commands use
        elif command[0] == gpu_evidence.TRAIN:
            config = load_config(words[1:], files=False, machine=False, code=False)
            assert make_plan(config, machine).device == "cuda", command
            if config.run.prepare is None:
                files = (config.data.train, *config.evaluation.datasets.values())
                folders |= {config.model.hf_checkpoint, *(str(Path(file).parent) for file in files if file)}
    needed = {folder for folder in folders if not Path(folder).is_absolute()}
    assert needed <= set(part.files), "skip_reason names missing files before the run"
    if all(command[0] in ("-c", gpu_evidence.TRAIN) for command in part.commands):
        assert needed == set(part.files)


def test_the_runs_of_a_part_have_different_folders() -> None:
    for part in gpu_evidence.PARTS:
        folders = [command[1] for command in part.commands if command[0] == gpu_evidence.TRAIN]
        assert len(set(folders)) == len(folders), part.name


def test_every_gpu_test_is_in_a_part() -> None:
    arguments = {argument for part in gpu_evidence.PARTS for command in part.commands for argument in command}
    marked = {
        str(file.relative_to(ROOT))
        for file in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"^(pytestmark = .*|@|    )pytest\.mark\.gpu\b", file.read_text(), re.MULTILINE)
        and "phantom" not in file.parts
    }
    assert marked - arguments == set()


def test_not_run_lists_the_parts_without_a_page_of_success() -> None:
    """``scripts/gpu_evidence.py --write-not-run`` writes the section."""
    text = (MEASUREMENTS / gpu_evidence.NOT_RUN).read_text()
    section = evidence_page.HEADING + text.partition(evidence_page.HEADING)[2].partition("\n## ")[0]
    assert section.strip() == gpu_evidence.not_run_section(gpu_evidence.PARTS, MEASUREMENTS)


def test_a_part_leaves_the_list_when_it_has_passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = part_of("raise SystemExit(1)", name="fails"), part_of("pass", name="passes")
    monkeypatch.setattr(gpu_evidence, "PARTS", parts)
    monkeypatch.setattr(gpu_evidence, "skip_reason", lambda part, nodes: None)
    page = tmp_path / gpu_evidence.NOT_RUN
    page.write_text("# Not run\n\n## Parts of the script\n\nold\n\n## Images\n\nby hand\n")
    words = ["--work", str(tmp_path / "work"), "--pages", str(tmp_path)]
    assert gpu_evidence.main([*words, "--write-not-run"]) == 0
    assert "**fails**" in page.read_text() and "**passes**" in page.read_text() and "old" not in page.read_text()
    assert gpu_evidence.main(words) == 1
    assert "**fails**" in page.read_text() and "**passes**" not in page.read_text()
    assert page.read_text().endswith("## Images\n\nby hand\n")


def test_a_part_becomes_a_page_and_a_result(tmp_path: Path) -> None:
    """The page has the log of every command, also of those after a failed one."""
    part = part_of("print('figures'); raise SystemExit(3)", "print('second', r'{folder}')")
    result = gpu_evidence.run_part(part, tmp_path)
    assert result.codes == (3, 0) and not result.passed and gpu_evidence.read_result(tmp_path) == result
    page = gpu_evidence.page_of(part, result, tmp_path)
    assert "failed after" in page and "exit code 3, exit code 0" in page and result.commit in page
    assert "\nfigures\n" in page and f"\nsecond {tmp_path}\n" in page


def test_a_part_is_killed_at_its_limit(tmp_path: Path) -> None:
    part = replace(part_of("import time; print('begun', flush=True); time.sleep(600)", "print('next')"), minutes=0)
    result = gpu_evidence.run_part(part, tmp_path)
    assert result.codes == (None,) and not result.passed and result.seconds < 60
    assert "stopped at its limit" in gpu_evidence.page_of(part, result, tmp_path)


def test_a_repeated_part_does_not_continue_its_earlier_runs(tmp_path: Path) -> None:
    part = part_of("import pathlib; pathlib.Path(r'{folder}/run').mkdir()")
    assert [gpu_evidence.run_part(part, tmp_path / "small").codes for _ in range(2)] == [(0,), (0,)]


def test_only_train_py_joins_the_cluster(tmp_path: Path) -> None:
    commands = evidence_parts.runs("+recipe=one_gpu", a="")[0], ("scripts/compare.py", "{folder}/a")
    words = [gpu_evidence.arguments_of(command, tmp_path, "10.0.0.1:6379") for command in commands]
    assert (
        words[0][:2] == ["train.py", f"run.dir={tmp_path}/a"] and words[0][-1] == "placement.ray_address=10.0.0.1:6379"
    )
    assert words[1] == ["scripts/compare.py", f"{tmp_path}/a"]


@pytest.mark.parametrize(
    ("changes", "nodes", "reason"),
    [
        ({}, (), "needs 1 GPU, and torch finds 0"),
        ({"needs": ("no_such_package",)}, (), "needs no_such_package"),
        ({"files": ("models/no_such_model",)}, (), "needs models/no_such_model"),
        ({"num_gpus": 8, "num_nodes": 2}, (8, 4), "needs --address of a Ray cluster with 2 nodes of 8 free GPUs, and finds 1"),
        ({"num_gpus": 8, "num_nodes": 2}, (8, 4, 8), None),
    ],
)  # fmt: skip
def test_the_missing_need_is_named(
    changes: dict[str, Any], nodes: tuple[int, ...], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert gpu_evidence.skip_reason(replace(part_of("pass"), **changes), nodes) == reason


def test_free_gpus_of_the_cluster_are_counted_by_node(monkeypatch: pytest.MonkeyPatch) -> None:
    local_ray, ray = (importlib.import_module(name) for name in ("slime_like.cluster.start.local_ray", "ray"))
    calls: list[str] = []
    nodes = [
        {"Alive": alive, "NodeManagerAddress": f"10.0.0.{i}", "NodeID": str(i), "Resources": {"GPU": 8.0, "CPU": 4.0}}
        for i, alive in enumerate((True, True, False))
    ]
    monkeypatch.setattr(local_ray, "reach", lambda address: calls.append(address))
    monkeypatch.setattr(local_ray, "available_resources_per_node", lambda: {"0": {"GPU": 8.0}, "1": {"GPU": 3.0}})
    monkeypatch.setattr(ray, "init", lambda **options: calls.append(options["address"]))
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(ray, "shutdown", lambda: calls.append("shutdown"))
    assert gpu_evidence.gpus_of_nodes("10.0.0.1:6379") == [8, 3]
    assert calls == ["10.0.0.1:6379", "10.0.0.1:6379", "shutdown"]


def test_a_cluster_that_does_not_answer_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_evidence.main(["--list", "--address", "127.0.0.1:1"]) == 2
    assert "'127.0.0.1:1': no Ray cluster answers" in capsys.readouterr().err


def test_gpus_that_are_too_small_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(total_memory=24 * 2**30)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: gpu)
    assert gpu_evidence.skip_reason(replace(part_of("pass"), gb=80), ()) == "needs GPUs of 80 GB, and GPU 0 has 26"
    assert gpu_evidence.skip_reason(replace(part_of("pass"), gb=24), ()) is None


def test_the_figures_of_runs_are_in_the_page(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    rows = (
        {"step": step, "perf/step_time": 10.0 - step, "train/num_tokens": 600, "perf/actor_train_time": 2}
        for step in range(3)
    )
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "metrics.jsonl").write_text("x\n")
    table = list(evidence_page.figure_table(tmp_path))
    assert "is not a line of metrics" in table[2]
    assert "| run | `perf/step_time` | 10 | 9 | 8 | 10 | 3 |" in table
    assert "| run | `train/num_tokens / perf/actor_train_time` | 300 | 300 | 300 | 300 | 3 |" in table


def test_the_figures_are_metrics_of_the_dictionary() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    names = {*evidence_page.FIGURES, evidence_page.TOKENS, evidence_page.SECONDS}
    assert [name for name in names if not name.startswith(("eval/", "memory/")) and f"`{name}`" not in text] == []


def test_figures_of_tests_are_in_the_table(tmp_path: Path) -> None:
    (tmp_path / "tests.xml").write_text(
        '<testsuites><testsuite><testcase name="query" time="0.1"><properties><property name="us" value="12"/></properties>'
        '</testcase><testcase name="other" time="2"><failure message="x"/></testcase></testsuite></testsuites>'
    )
    rows = list(evidence_page.test_table(tmp_path / "tests.xml"))
    assert rows[2:4] == ["| `query` | passed | 0.1 | us 12 |", "| `other` | failure | 2 |  |"]


def test_a_result_at_this_commit_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    marker = tmp_path / "runs"
    part = part_of(f"open({str(marker)!r}, 'a').write('x')")
    monkeypatch.setattr(gpu_evidence, "PARTS", (part, replace(part, name="other", num_gpus=10**6)))
    monkeypatch.setattr(gpu_evidence, "skip_reason", lambda p, nodes: "needs GPUs" if p.num_gpus > 1 else None)
    words = ["--work", str(tmp_path / "work"), "--pages", str(tmp_path)]
    assert [gpu_evidence.main(words), gpu_evidence.main(words)] == [0, 0]
    assert marker.read_text() == "x"
    assert gpu_evidence.main([*words, "--again"]) == 0
    assert marker.read_text() == "xx"
    out = capsys.readouterr().out
    assert "small: has a result at this commit" in out and "other: needs GPUs" in out


def test_a_damaged_result_is_none(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text('{"codes": [0]}')
    assert gpu_evidence.read_result(tmp_path) is None
    (tmp_path / "result.json").write_text('{"codes": [0, null], "seconds": 1.0, "commit": "a"}')
    assert gpu_evidence.read_result(tmp_path) == gpu_evidence.PartResult((0, None), 1.0, "a")


def test_names_that_older_torch_lacks_are_removed(tmp_path: Path) -> None:
    for file in gpu_bundle.OLDER_TORCH:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text((ROOT / file).read_text())
    gpu_bundle.edit(tmp_path, gpu_bundle.OLDER_TORCH)
    for file in gpu_bundle.OLDER_TORCH:
        text = (tmp_path / file).read_text()
        compile(text, file, "exec")
        assert "enable_gqa=True" not in text and '"all_to_all_single")' not in text and "all_gather_single" not in text
    with pytest.raises(SystemExit, match=r"gather\.py has no .*review OLDER_TORCH"):
        gpu_bundle.edit(tmp_path, {"plugins/slime_like_plugins/flow_mla/gather.py": ((r"all_gather_single", ""),)})


def test_packed_packages_are_pinned() -> None:
    names = [requirement.partition("==")[0] for requirement in gpu_bundle.versions(gpu_bundle.LOCK.read_text())]
    assert names == list(gpu_bundle.PACKAGES)
    with pytest.raises(SystemExit, match="lacks antlr4"):
        gpu_bundle.versions("torch==2.14.1")


INSTALLED = ("torch", "triton", "transformers", "pytest")  # on a machine that gets a bundle
WITHOUT_OTHERS = """
import importlib.machinery, sys
finders = sys.meta_path[:]
class Installed:
    find_distributions = importlib.machinery.PathFinder.find_distributions
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] not in BLOCKED:
            return next((spec for finder in finders if (spec := finder.find_spec(name, path, target))), None)
sys.meta_path[:] = [Installed]
sys.argv = ["gpu_evidence"]
import pytest
from scripts import gpu_evidence
assert gpu_evidence.main(["--list"]) == 0
sys.exit(pytest.main(["-p", "xdist.plugin", "-p", "no:cacheprovider", "--collect-only", "-q", "-m", "gpu", *FILES]))
"""


def required(names: Iterable[str]) -> set[str]:
    """Return distributions and all that they require."""
    out: set[str] = set()
    remaining = [canonicalize_name(name) for name in names]
    while remaining:
        name = remaining.pop()
        if name in out:
            continue
        out.add(name)
        with suppress(PackageNotFoundError):
            for requirement in map(Requirement, metadata.requires(name) or ()):
                if not requirement.marker or requirement.marker.evaluate({"extra": ""}):
                    remaining.append(canonicalize_name(requirement.name))
    return out


@pytest.mark.slow
def test_a_bundle_has_the_packages_that_its_parts_import() -> None:
    """The script starts and pytest imports the tests of parts without engines, if no other package can be imported."""
    known = required(INSTALLED) | set(gpu_bundle.PACKAGES)
    modules = read_distributions().items()
    blocked = {name for name, owners in modules if not known & {canonicalize_name(owner) for owner in owners}}
    assert {"ray", "sglang"} <= blocked - {"slime_like", "slime_like_plugins"}
    parts = [part for part in gpu_evidence.PARTS if not {"sglang", "flashinfer"} & set(part.needs)]
    commands = [command for part in parts for command in part.commands if "--noconftest" not in command]
    files = [word for command in commands for word in command if word.startswith("tests/")]
    code = f"BLOCKED = {blocked - {'slime_like', 'slime_like_plugins', 'slime_like_compat'}}\nFILES = {files}\n{WITHOUT_OTHERS}"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**environment, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=240 * scale(),
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_project_is_packed_with_its_commit(tmp_path: Path) -> None:
    gpu_bundle.export_project(tmp_path / "project")
    assert (tmp_path / "project" / "scripts" / "gpu_evidence.py").is_file()
    assert re.fullmatch(r"[0-9a-f]{7,40}\n", (tmp_path / "project" / "COMMIT").read_text()), sys.version


def test_a_kernel_cache_is_packed_without_intermediate_files(tmp_path: Path) -> None:
    (tmp_path / "cache" / "KEY").mkdir(parents=True)
    with pytest.raises(SystemExit, match=r"no compiled kernels: run scripts/compile_kernels\.py"):
        gpu_bundle.copy_kernels(tmp_path / "cache", tmp_path / "packed")
    for name in ("a.cubin", "a.json", "__grp__a.json", "a.ttir", "a.ptx", "b.autotune.json", "lock"):
        (tmp_path / "cache" / "KEY" / name).write_text("x")
    gpu_bundle.copy_kernels(tmp_path / "cache", tmp_path / "packed")
    packed = {file.name for file in (tmp_path / "packed" / "KEY").iterdir()}
    assert packed == {"a.cubin", "a.json", "__grp__a.json"}
