"""Write the tables of SGLang's and Megatron's option names that ``slime_like.config`` checks keys against.

The source of the installed packages is read with ``ast``, because importing them takes seconds and may need a device.

    python scripts/dump_upstream_keys.py            # rewrite slime_like/config/rules/upstream/*.json
    python scripts/dump_upstream_keys.py --check    # exit 1 if a file differs from the installed packages
"""

from __future__ import annotations

import argparse
import ast
import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slime_like.printable import visible

OUT = Path(__file__).parents[1] / "slime_like" / "config" / "rules" / "upstream"
Table = dict[str, dict[str, Any]]


def package_folder(name: str) -> Path:
    """Return the folder of an installed package without importing it."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.submodule_search_locations, f"{name} is not installed"
    return Path(spec.submodule_search_locations[0])


def class_fields(node: ast.ClassDef) -> Iterator[tuple[str, ast.expr, ast.expr | None]]:
    """Yield the name, annotation and default of each field of a dataclass or msgspec struct."""
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            name, annotation = item.target.id, ast.unparse(item.annotation)
            if "ClassVar" not in annotation:
                yield name, item.annotation, item.value


def default_text(value: ast.expr | None) -> str | None:
    """Return a field's default as source text; None for a required field."""
    if isinstance(value, ast.Call) and ast.unparse(value.func).rpartition(".")[2] == "field":
        arguments = {k.arg: k.value for k in value.keywords}
        if "default" in arguments:
            return ast.unparse(arguments["default"])
        factory = arguments.get("default_factory")
        return None if factory is None else f"{ast.unparse(factory)}()"
    return None if value is None else ast.unparse(value)


def cli_names(name: str, metadata: list[ast.expr]) -> list[str]:
    """Return the flags of an SGLang field, except the one derived from its name."""
    keys: list[str] = []
    for call in metadata:
        for keyword in call.keywords if isinstance(call, ast.Call) else []:
            if keyword.arg in ("aliases", "cli_name") and not isinstance(keyword.value, ast.Name):
                value = ast.literal_eval(keyword.value)
                keys += [value] if isinstance(value, str) else list(value or [])
    return [flag for flag in keys if flag != f"--{name.replace('_', '-')}"]


def sglang_server_args() -> Table:
    """Return the fields of ``sglang.srt.server_args.ServerArgs``, which the classes in ``arg_groups/fields`` declare."""
    table: Table = {}
    for path in sorted((package_folder("sglang") / "srt" / "arg_groups" / "fields").glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if not (isinstance(node, ast.ClassDef) and any("_NS_PATH" in ast.unparse(i) for i in node.body)):
                continue
            for name, annotation, value in class_fields(node):
                metadata: list[ast.expr] = []
                if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "A":
                    assert isinstance(annotation.slice, ast.Tuple), f"{path}: {name} has no help"
                    annotation, *metadata = annotation.slice.elts
                table[name] = {"type": ast.unparse(annotation), "default": default_text(value)}
                if flags := cli_names(name, metadata):
                    table[name]["flags"] = flags
    return table


def megatron_transformer_config() -> Table:
    """Return the fields of ``megatron.core.transformer.TransformerConfig``, its base ``ModelParallelConfig`` first."""
    core = package_folder("megatron.core")
    sources = {
        "ModelParallelConfig": core / "model_parallel_config.py",
        "TransformerConfig": core / "transformer" / "transformer_config.py",
    }
    table: Table = {}
    for package, path in sources.items():
        classes = {node.name: node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)}
        bases = [ast.unparse(base) for base in classes[package].bases]
        assert all(base in sources for base in bases), f"{package} has a base this script does not read: {bases}"
        for name, annotation, value in class_fields(classes[package]):
            table[name] = {"type": ast.unparse(annotation), "default": default_text(value)}
    return table


def render(distribution: str, table: Table) -> str:
    """Return the text of a JSON file: the version, then one line per key."""
    lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(entry)}" for name, entry in sorted(table.items()))
    version = json.dumps(f"{distribution} {importlib.metadata.version(distribution)}")
    return f'{{\n  "source": {version},\n  "keys": {{\n{lines}\n  }}\n}}\n'


def files() -> dict[Path, str]:
    """Return the expected content of each file."""
    return {
        OUT / "sglang_server_args.json": render("sglang", sglang_server_args()),
        OUT / "megatron_transformer_config.json": render("megatron-core", megatron_transformer_config()),
    }


def main(argv: list[str]) -> int:
    """Write the files or, with ``--check``, compare them; return exit code 1 if a compared file is stale, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a file is stale")
    check = parser.parse_args(argv).check
    stale = {path: text for path, text in files().items() if not path.exists() or path.read_text() != text}
    for path, text in stale.items():
        if check:
            print(visible(f"{path} differs from the installed package: run python scripts/{Path(__file__).name}"))
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            print(visible(f"wrote {path}"))
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
