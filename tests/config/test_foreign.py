"""Tables of SGLang's and Megatron's fields: current, typed, and including the fields that this project sets."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from slime_like.config.rules import foreign

SCRIPT = Path(__file__).parents[2] / "scripts" / "dump_upstream_keys.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("dump_upstream_keys", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_match_the_installed_packages(script: ModuleType) -> None:
    for path, text in script.files().items():
        assert path.read_text() == text, f"{path.name} is stale: run python scripts/dump_upstream_keys.py"


def test_an_unknown_argument_is_refused_before_a_table_is_written(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "files", lambda: pytest.fail("the tables were computed"))
    with pytest.raises(SystemExit) as refusal:
        script.main(["--chekc"])
    assert refusal.value.code == 2


def test_tables_hold_fields_of_every_kind() -> None:
    sglang, megatron = foreign.table(foreign.SGLANG), foreign.table(foreign.MEGATRON)
    assert sglang["mem_fraction_static"] == {"type": "Optional[float]", "default": "None"}
    assert "--decode-context-parallel-size" in sglang["dcp_size"].get("flags", [])
    assert megatron["tensor_model_parallel_size"]["default"] == "1"  # from the base class
    assert megatron["num_layers"]["default"] == "0"  # inside dataclasses.field
    assert foreign.source(foreign.SGLANG).startswith("sglang ")


@pytest.mark.parametrize("name", [foreign.SGLANG, foreign.MEGATRON])
def test_every_annotation_is_understood(name: str) -> None:
    entries = foreign.table(name)
    objects = {key: t for key, entry in entries.items() if not foreign.settable(t := entry["type"])}
    words = (
        "Callable",
        "CudaGraphConfig",
        "RecipeConfig",
        "torch.dtype",
        "ContextManager",
        "AttnBackend",
        "GraphScope",
    )
    assert {key: t for key, t in objects.items() if not any(word in t for word in words)} == {}
    assert set(foreign.OWNED[name]) <= set(entries)


@pytest.mark.parametrize(
    ("annotation", "good", "bad"),
    [
        ("bool", [True], [1, "true", None]),
        ("int", [3], [True, 1.5, "3"]),
        ("float", [1, 0.5], [True, "x", float("nan"), float("inf"), 10**400]),
        ("Dict[str, Any]", [{"a": 0.5}], [{"a": float("nan")}]),
        ("Optional[List[int]]", [None, [1, 2], []], [["a"], 1]),
        ("Literal['a', None]", ["a", None], ["b"]),
        ("Optional[Union[str, Dict[str, int]]]", ["a", {"a": 1}, None], [{"a": "b"}, 3]),
        ("int | None", [1, None], ["a"]),
        ("Optional[Tuple[int, int]]", [[1, 2], None], [[1], [1, 2, 3]]),
        ("Callable[[torch.Tensor], torch.Tensor]", [], ["gelu", None]),
    ],
)
def test_values_are_checked_against_annotations(annotation: str, good: list[object], bad: list[object]) -> None:
    assert [value for value in good if not foreign.accepts(annotation, value)] == []
    assert [value for value in bad if foreign.accepts(annotation, value)] == []
