"""The flags that engines define, read by ast from their source: nothing of an engine is imported.

    python tests/serving/engine_flags.py     write tests/serving/engine_flags.json from the engines that are here

vLLM's are add_argument calls, and fields of a class for its server's own; SGLang's are fields of its namespaces;
TensorRT-LLM's are options of click. vLLM is looked for in .venv-engine and .bench/wheels, SGLang in .bench/wheels.
TensorRT-LLM's list was read from commands/serve.py at commit 00209af of its repository, of the time of 1.2.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SNAPSHOT = Path(__file__).with_name("engine_flags.json")
Known = dict[str, dict[str, list[str]]]


def packages() -> dict[str, Path]:
    """Package folders by engine and version."""
    found = {}
    for folder in sorted((ROOT / ".bench" / "wheels").glob("*-*")):
        engine, _, version = folder.name.partition("-")
        kept = folder / engine
        if (kept / "engine" / "arg_utils.py").is_file() or (kept / "srt" / "arg_groups" / "fields").is_dir():
            found[f"{engine} {version}"] = kept
    for package in ROOT.glob(".venv-engine/lib/python3*/site-packages/vllm"):
        version = (
            next(package.parent.glob("vllm*.dist-info")).name.rpartition(".dist-info")[0].rpartition("-")[2]
        )
        found[f"vllm {version}"] = package
    return found


def read(engine: str, package: Path) -> dict[str, list[str]]:
    """``flags`` of the command, and ``variables`` that it reads, of one package."""
    if engine.startswith("vllm"):
        flags = set(_added(package / "engine" / "arg_utils.py"))
        for file in (package / "entrypoints").rglob("cli_args.py"):
            flags |= {*_added(file), *_fields(file)}
        variables = _keys(package / "envs.py", "environment_variables")
        return {"flags": sorted(flags), "variables": sorted(variables)}
    files = (package / "srt" / "arg_groups" / "fields").glob("*.py")
    return {"flags": sorted({flag for file in files for flag in _fields(file)}), "variables": []}


def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def _added(file: Path) -> Iterator[str]:
    for node in ast.walk(_tree(file)):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            for word in node.args:
                if isinstance(word, ast.Constant) and str(word.value).startswith("--"):
                    yield str(word.value)


def _fields(file: Path) -> Iterator[str]:
    """Annotated fields of classes as flags, and the aliases that their annotations give."""
    for node in ast.walk(_tree(file)):
        if isinstance(node, ast.ClassDef):
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    yield "--" + field.target.id.replace("_", "-")
                    for word in ast.walk(field.annotation):
                        if isinstance(word, ast.Constant) and str(word.value).startswith("--"):
                            yield str(word.value).split()[0]


def _keys(file: Path, name: str) -> Iterator[str]:
    for node in ast.walk(_tree(file)):
        targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
        if any(getattr(target, "id", "") == name for target in targets) and isinstance(node.value, ast.Dict):
            yield from (str(key.value) for key in node.value.keys if isinstance(key, ast.Constant))


def main() -> int:
    known: Known = json.loads(SNAPSHOT.read_text()) if SNAPSHOT.exists() else {}
    known |= {name: read(name, package) for name, package in packages().items()}
    SNAPSHOT.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")
    print(", ".join(f"{name}: {len(lists['flags'])} flags" for name, lists in sorted(known.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
