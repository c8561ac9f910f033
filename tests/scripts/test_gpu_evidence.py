"""Parts of ``scripts/gpu_evidence.py``, and the files that ``scripts/gpu_bundle.py`` packs."""

from __future__ import annotations

import importlib
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
gpu_bundle: Any = importlib.import_module("scripts.gpu_bundle")
gpu_evidence: Any = importlib.import_module("scripts.gpu_evidence")


def part_of(code: str) -> Any:
    return gpu_evidence.EvidencePart("small", "Small", ("-c", code), 1)


def test_every_part_names_files_that_exist() -> None:
    for part in gpu_evidence.PARTS:
        files = [argument for argument in part.arguments if argument.endswith(".py")]
        assert files, part
        assert [file for file in files if not (ROOT / file).is_file()] == []
    assert len({part.name for part in gpu_evidence.PARTS}) == len(gpu_evidence.PARTS)


def test_every_gpu_test_is_in_a_part() -> None:
    arguments = {argument for part in gpu_evidence.PARTS for argument in part.arguments}
    marked = {
        str(file.relative_to(ROOT))
        for file in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"^(pytestmark = .*|@|    )pytest\.mark\.gpu\b", file.read_text(), re.MULTILINE)
        and "phantom" not in file.parts
    }
    assert marked - arguments == set()


def test_a_part_becomes_a_page_and_a_result(tmp_path: Path) -> None:
    part = part_of("print('figures'); raise SystemExit(3)")
    result = gpu_evidence.run_part(part, tmp_path)
    assert result.code == 3 and gpu_evidence.read_result(tmp_path) == result
    page = gpu_evidence.page_of(part, result, tmp_path)
    assert "exit code 3" in page and "figures" in page and result.commit in page


def test_a_part_is_killed_at_its_limit(tmp_path: Path) -> None:
    part = replace(part_of("import time; print('begun', flush=True); time.sleep(600)"), minutes=0)
    result = gpu_evidence.run_part(part, tmp_path)
    assert result.code is None and result.seconds < 60
    assert "stopped at its limit" in gpu_evidence.page_of(part, result, tmp_path)


def test_figures_of_tests_are_in_the_table(tmp_path: Path) -> None:
    (tmp_path / "tests.xml").write_text(
        '<testsuites><testsuite><testcase name="query" time="0.1"><properties><property name="us" value="12"/></properties>'
        '</testcase><testcase name="other" time="2"><failure message="x"/></testcase></testsuite></testsuites>'
    )
    rows = list(gpu_evidence.test_table(tmp_path / "tests.xml"))
    assert rows[2:4] == ["| `query` | passed | 0.1 | us 12 |", "| `other` | failure | 2 |  |"]


def test_a_result_at_this_commit_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    marker = tmp_path / "runs"
    part = part_of(f"open({str(marker)!r}, 'a').write('x')")
    monkeypatch.setattr(gpu_evidence, "PARTS", (part, replace(part, name="other", num_gpus=10**6)))
    monkeypatch.setattr(gpu_evidence, "_reason_to_skip", lambda p: "needs GPUs" if p.num_gpus > 1 else None)
    words = ["--work", str(tmp_path / "work"), "--pages", str(tmp_path)]
    assert [gpu_evidence.main(words), gpu_evidence.main(words)] == [0, 0]
    assert marker.read_text() == "x"
    assert gpu_evidence.main([*words, "--again"]) == 0
    assert marker.read_text() == "xx"
    out = capsys.readouterr().out
    assert "small: has a result at this commit" in out and "other: needs GPUs" in out


def test_a_damaged_result_is_none(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text('{"code": 0}')
    assert gpu_evidence.read_result(tmp_path) is None
    (tmp_path / "result.json").write_text('{"code": 0, "seconds": 1.0, "commit": "a"}')
    assert gpu_evidence.read_result(tmp_path) == gpu_evidence.PartResult(0, 1.0, "a")


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
