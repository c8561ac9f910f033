"""Code that a model folder brings is never run, and said to be there before anything is read with transformers or SGLang."""

import ast
import json
from pathlib import Path

import pytest

from slime_like.config.rules.foreign import check_foreign
from slime_like.config.rules.hf import check_tokenizer, read_hf_config
from slime_like.config.schema.resolved import EngineSpec
from slime_like.data.tokenizer import open_tokenizer
from slime_like.errors import CheckpointError, ConfigError
from slime_like.rollout.engine.server import EngineLaunch, server_arguments
from slime_like.train.megatron.families.hf import HFFolder
from tests.config.model_folder import write_model

REPOSITORY = Path(__file__).parents[2]
SOURCES = [path for name in ("slime_like", "plugins", "scripts") for path in sorted((REPOSITORY / name).rglob("*.py"))]


def test_every_call_says_that_code_is_not_trusted() -> None:
    calls = [
        (path, node)
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "from_pretrained"
    ]
    assert len(calls) >= 6
    for path, call in calls:
        said = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        assert said.get("trust_remote_code") == "False", f"{path}:{call.lineno}"


def test_every_pickle_is_read_by_an_allow_list() -> None:
    """``pickle.load``, ``torch.load`` and ``numpy.load`` occur in the product with a restriction, or not at all."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            name = ast.unparse(node.func)
            said = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            where = f"{path}:{node.lineno}"
            assert name not in ("pickle.load", "pickle.loads") or path.name == "bench_gdn_layer.py", (
                where
            )  # its own ranks'
            assert name != "torch.load" or said.get("weights_only") == "True", where
            assert name not in ("np.load", "numpy.load") or said.get("allow_pickle") == "False", where


def with_code(folder: Path, marker: Path) -> Path:
    """A model folder whose configuration and tokenizer are classes of a file in it."""
    auto_map = {"AutoConfig": "own.Config", "AutoTokenizer": ["own.Tokenizer", None]}
    write_model(folder, model_type="own", auto_map=auto_map)
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Tokenizer", "auto_map": auto_map}))
    (folder / "own.py").write_text(f"open({str(marker)!r}, 'w')\nclass Config: ...\nclass Tokenizer: ...\n")
    return folder


def test_a_folder_with_code_is_refused_in_words(tmp_path: Path) -> None:
    folder, marker = with_code(tmp_path / "model", tmp_path / "ran"), tmp_path / "ran"
    words = r"auto_map .*'own\.Config'.* code of its own, which is never run here"
    with pytest.raises(CheckpointError, match=rf"model\.hf_checkpoint: .*/config\.json has {words}"):
        read_hf_config("model.hf_checkpoint", str(folder))
    with pytest.raises(CheckpointError, match=rf"model\.hf_checkpoint: .*/tokenizer_config\.json has {words}"):
        check_tokenizer("model.hf_checkpoint", str(folder), needs_template="")
    with pytest.raises(CheckpointError, match=rf"teacher\.hf_checkpoint: .*/config\.json has {words}"):
        HFFolder(folder, "teacher.hf_checkpoint")
    with pytest.raises(ValueError, match="custom code"):
        open_tokenizer(str(folder))
    assert not marker.exists()


def test_sglang_is_told_as_well() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.sglang\.trust_remote_code=True belongs to the run itself"):
        check_foreign("rollout.sglang", {"trust_remote_code": True})
    asked = {"trust_remote_code": True}
    spec = EngineSpec("m", "cpu", "float32", 1, 64, 0, "log", start_deadline_s=1, request_deadline_s=1, sglang=asked)
    assert server_arguments(EngineLaunch(spec, "key", "127.0.0.1", 1))["trust_remote_code"] is False
