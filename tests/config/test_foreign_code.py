"""Code in model folders: never run, and refused before transformers or SGLang reads the folder."""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime_like.config.rules.foreign import check_foreign
from slime_like.config.rules.hf import check_tokenizer, read_hf_config
from slime_like.config.schema.resolved import EngineSpec
from slime_like.data.tokenizer import open_tokenizer
from slime_like.errors import CheckpointError, ConfigError
from slime_like.rollout.engine.main import EngineLaunch, server_arguments
from slime_like.train.megatron.families.hf import HFFolder
from tests.config.model_folder import write_model

REPOSITORY = Path(__file__).parents[2]
FOLDERS = ("slime_like", "slime_like_compat", "plugins", "scripts", "benchmarks", "examples")
SOURCES = [path for name in FOLDERS for path in sorted((REPOSITORY / name).rglob("*.py"))]
# Benchmarks that read pickles of their own processes.
OF_ITS_OWN_PROCESSES = {REPOSITORY / "benchmarks" / name for name in ("gdn_layer.py", "manager.py")}


def calls_of_attributes(*names: str) -> Iterator[tuple[Path, ast.Call]]:
    """Yield the calls ``x.name(...)`` in the sources; parse only files that contain a name."""
    pattern = re.compile(rf"\b({'|'.join(names)})\b")
    for path in SOURCES:
        if pattern.search(source := path.read_text()):
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in names:
                    yield path, node


def test_every_from_pretrained_call_disables_remote_code() -> None:
    calls = list(calls_of_attributes("from_pretrained"))
    assert len(calls) >= 5
    for path, call in calls:
        arguments = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        assert arguments.get("trust_remote_code") == "False", f"{path}:{call.lineno}"


def test_every_load_of_pickled_data_is_restricted() -> None:
    """Check that calls of ``pickle.load``, ``torch.load`` and ``numpy.load`` in the sources are restricted."""
    calls = list(calls_of_attributes("load", "loads"))
    assert len(calls) >= 5
    for path, call in calls:
        name = ast.unparse(call.func)
        arguments = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        place = f"{path}:{call.lineno}"
        assert name not in ("pickle.load", "pickle.loads") or path in OF_ITS_OWN_PROCESSES, place
        assert name != "torch.load" or arguments.get("weights_only") == "True", place
        assert name not in ("np.load", "numpy.load") or arguments.get("allow_pickle") == "False", place


def with_code(folder: Path, marker: Path) -> Path:
    """Write a model folder whose configuration and tokenizer classes are defined in one of its files."""
    auto_map = {"AutoConfig": "own.Config", "AutoTokenizer": ["own.Tokenizer", None]}
    write_model(folder, model_type="own", auto_map=auto_map)
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Tokenizer", "auto_map": auto_map}))
    (folder / "own.py").write_text(f"open({str(marker)!r}, 'w')\nclass Config: ...\nclass Tokenizer: ...\n")
    return folder


def test_a_folder_with_code_is_refused(tmp_path: Path) -> None:
    folder, marker = with_code(tmp_path / "model", tmp_path / "ran"), tmp_path / "ran"
    words = r"auto_map .*'own\.Config'.* its own code, which is never run"
    with pytest.raises(CheckpointError, match=rf"model\.hf_checkpoint: .*/config\.json has {words}"):
        read_hf_config("model.hf_checkpoint", str(folder))
    with pytest.raises(CheckpointError, match=rf"model\.hf_checkpoint: .*/tokenizer_config\.json has {words}"):
        check_tokenizer("model.hf_checkpoint", str(folder), needs_template="")
    with pytest.raises(CheckpointError, match=rf"teacher\.hf_checkpoint: .*/config\.json has {words}"):
        HFFolder(folder, "teacher.hf_checkpoint")
    with pytest.raises(ValueError, match="custom code"):
        open_tokenizer(str(folder))
    assert not marker.exists()


def test_code_with_a_model_type_that_is_not_text_is_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", model_type=[], auto_map={"AutoConfig": "own.Config"})
    with pytest.raises(CheckpointError, match=r"config\.json has auto_map"):
        read_hf_config("model.hf_checkpoint", str(folder))


@pytest.mark.parametrize("model_type", ["deepseek_v3", "kimi_k2", "mimo", "minimax_m2"])
def test_code_of_a_supported_family_is_not_needed(model_type: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", model_type=model_type, auto_map={"AutoConfig": "own.Config"})
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Config: ...\n")
    assert HFFolder(folder, "model.hf_checkpoint").config().model_type == model_type
    assert not (tmp_path / "ran").exists()


def test_sglang_gets_trust_remote_code_false() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.sglang\.trust_remote_code=True belongs to the run itself"):
        check_foreign("rollout.sglang", {"trust_remote_code": True})
    options = {"trust_remote_code": True}
    spec = EngineSpec("m", "cpu", "float32", 1, 64, 0, "log", start_deadline_s=1, sglang=options)
    assert server_arguments(EngineLaunch(spec, "key", "127.0.0.1", 1))["trust_remote_code"] is False
