"""The lists that engines keep in their source, read by ast from unpacked wheels: nothing of an engine is imported.

    python tests/engine_sources.py              compare tests/hardware/engine_names.json with the wheels that are here
    python tests/engine_sources.py --write      write it from them; versions whose wheel is not here stay as they are

Wheels are looked for under .bench/wheels/NAME-VERSION, where engines/wheels.sh puts them, and in .venv-engine.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SNAPSHOT = Path(__file__).parent / "hardware" / "engine_names.json"
Lists = dict[str, Any]


def wheels() -> dict[tuple[str, str], Path]:
    """Package folders by engine and version, newest version last."""
    found = {}
    for folder in (ROOT / ".bench" / "wheels").glob("*-*"):
        engine, _, version = folder.name.partition("-")
        if (folder / engine).is_dir():
            found[engine, version] = folder / engine
    for package in ROOT.glob(".venv-engine/lib/python3*/site-packages/vllm"):
        infos = sorted(package.parent.glob("vllm*.dist-info"))
        named = re.search(r"-([0-9.]+)\.dist-info$", infos[0].name) if infos else None
        if named is not None:
            found["vllm", named[1]] = package
    return dict(sorted(found.items(), key=lambda item: (item[0][0], version_key(item[0][1]))))


def version_key(version: str) -> tuple[int, ...]:
    """Versions in order: 0.9 before 0.33."""
    return tuple(int(part) for part in re.findall(r"\d+", version))


def read(engine: str, package: Path) -> Lists:
    """The lists of one wheel."""
    return vllm(package) if engine == "vllm" else sglang(package)


def fingerprint(lists: Lists) -> str:
    """SHA-256 of the lists, written the same way everywhere."""
    return hashlib.sha256(json.dumps(lists, sort_keys=True).encode()).hexdigest()


# ---- vLLM


def vllm(package: Path) -> Lists:
    """vLLM's: names of methods, caches, dtypes and backends, and kernels in the order in which they are tried."""
    methods = _assigned(package / "model_executor/layers/quantization/__init__.py")
    cache, kernel = _assigned(package / "config/cache.py"), _assigned(package / "config/kernel.py")
    config = _assigned(package / "config/quantization.py")
    return {
        "methods": _strings(methods["QuantizationMethods"]),
        "deprecated": _strings(methods["DEPRECATED_QUANTIZATION_METHODS"]),
        "classes": _classes(package / "model_executor/layers/quantization/__init__.py"),
        "online": _keys(config["_ONLINE_SHORTHANDS"]),
        "quant keys": _keys(config["QUANT_KEY_NAMES"]),
        "kv": _strings(cache["CacheDType"]),
        "kv backends": _kv_backends(package / "v1/attention/backends"),
        "dtype": _strings(_assigned(package / "config/model.py")["ModelDType"]),
        "linear backends": _strings(kernel["LinearBackend"]),
        "expert backends": _strings(kernel["MoEBackend"]),
        "linear kernels": _linear(package / "model_executor/kernels/linear/__init__.py"),
        "expert kernels": _experts(package / "model_executor/layers/fused_moe/oracle"),
        "backend kernels": _backends(package / "model_executor/kernels/linear/__init__.py"),
        "expert overrides": _overrides(package / "model_executor/layers/fused_moe/oracle"),
        "humming ranked": _ranked(package),
        "humming first": _humming(package / "model_executor/layers/quantization/utils/humming/priority.py"),
    }


def _classes(file: Path) -> dict[str, str]:
    """Method names to the names of their configuration classes."""
    for node in ast.walk(ast.parse(file.read_text())):
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and node.target.id == "method_to_config"
            and isinstance(node.value, ast.Dict)
        ):
            return {
                str(key.value): value.id
                for key, value in zip(node.value.keys, node.value.values, strict=True)
                if isinstance(key, ast.Constant) and isinstance(value, ast.Name)
            }
    raise LookupError(f"no method_to_config in {file}")


def _kv_backends(folder: Path) -> dict[str, list[str]]:
    """Names of cache dtypes to the attention backends that list them."""
    found: dict[str, list[str]] = {}
    for file in sorted(folder.rglob("*.py")):
        tree = ast.parse(file.read_text())
        globals_ = {name: value for node in tree.body for name, value in _targets(node)}
        for cls in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
            for node in cls.body:
                for name, value in _targets(node):
                    if name == "supported_kv_cache_dtypes":
                        known = {each.id for each in ast.walk(value) if isinstance(each, ast.Name)}
                        listed = [
                            value,
                            *(globals_[each] for each in sorted(known & globals_.keys())),
                        ]
                        for word in dict.fromkeys(word for each in listed for word in _strings(each)):
                            found.setdefault(word, []).append(cls.name.removesuffix("Backend"))
    return {word: sorted(names) for word, names in sorted(found.items())}


def short(name: str) -> str:
    """A kernel's class as our rows call it: CutlassFP8ScaledMMLinearKernel is CutlassFP8."""
    for ending in ("LinearKernel", "ScaledMM", "Kernel"):
        name = name.removesuffix(ending)
    return name.removesuffix("ScaledMM")


def _linear(file: Path) -> dict[str, dict[str, list[str]]]:
    """vLLM's lists of linear kernels by platform, names shortened."""
    lists = {}
    for node in ast.parse(file.read_text()).body:
        for name, value in _targets(node):
            if name.startswith("_POSSIBLE") and isinstance(value, ast.Dict):
                lists[name] = {
                    key.attr: [short(item.id) for item in each.elts if isinstance(item, ast.Name)]
                    for key, each in zip(value.keys, value.values, strict=True)
                    if isinstance(key, ast.Attribute) and isinstance(each, ast.List)
                }
    return lists


def _backends(file: Path) -> dict[str, list[str]]:
    """Names of --linear-backend to the kernels that they stand for."""
    value = _assigned(file)["_LINEAR_BACKEND_KERNEL_MAP"]
    if not isinstance(value, ast.Dict):
        raise LookupError(f"no map of backends in {file}")
    return {
        str(key.value): sorted(short(item.id) for item in each.elts if isinstance(item, ast.Name))
        for key, each in zip(value.keys, value.values, strict=True)
        if isinstance(key, ast.Constant) and isinstance(each, ast.Set)
    }


def _experts(folder: Path) -> dict[str, list[list[str]]]:
    """Oracle and function → its lists of expert backends with at least two members, in the order they stand in."""
    lists: dict[str, list[list[str]]] = {}
    for file in sorted(folder.glob("*.py")):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef) and re.match(r"_get_.*priority|select_", node.name):
                values: list[ast.expr] = [each for each in ast.walk(node) if isinstance(each, ast.List)]
                named = node.name
            elif any(name == "_SUPPORTED_BACKENDS" for name, _ in _targets(node)):
                values, named = [value for _, value in _targets(node)], "_SUPPORTED_BACKENDS"
            else:
                continue
            found = [_members(each) for each in values]
            found = [each for each in found if len(each) > 1]
            if found:
                lists[f"{file.stem}.{named}"] = found
    return lists


def _overrides(folder: Path) -> dict[str, list[list[str]]]:
    """Oracle and function → [condition, call] of what moves, inserts or removes backends in its lists."""
    found: dict[str, list[list[str]]] = {}
    for file in sorted(folder.glob("*.py")):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef) and re.match(r"_get_.*priority", node.name):
                for branch in (each for each in ast.walk(node) if isinstance(each, ast.If)):
                    for test, body in ((ast.unparse(branch.test), branch.body), ("else", branch.orelse)):
                        calls = [ast.unparse(each) for each in body if isinstance(each, ast.Expr)]
                        if calls:
                            found.setdefault(f"{file.stem}.{node.name}", []).append([test, "; ".join(calls)])
    return found


def _members(node: ast.expr) -> list[str]:
    if not isinstance(node, ast.List | ast.Tuple):
        return []
    return [
        each.attr
        for each in node.elts
        if isinstance(each, ast.Attribute) and "Backend" in ast.unparse(each.value)
    ]


def _ranked(package: Path) -> list[str]:
    """Functions that bring Humming forward: those of the oracles, and the one of linear kernels."""
    files = sorted((package / "model_executor/layers/fused_moe/oracle").glob("*.py"))
    return [
        f"{file.parent.name}/{file.stem}.{node.name}"
        for file in [*files, package / "model_executor/kernels/linear/__init__.py"]
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef) and "prioritize_humming(" in ast.unparse(node)
    ]


def _humming(file: Path) -> list[int]:
    value = _assigned(file)["_HUMMING_PREFERRED_CAPABILITIES"]
    return sorted(int(str(each.value)) for each in ast.walk(value) if isinstance(each, ast.Constant))


# ---- SGLang


def sglang(package: Path) -> Lists:
    """SGLang's: the same, and its automatic choices as chains of conditions."""
    srt = package / "srt"
    choices = _assigned(srt / "arg_groups/choices.py")
    fields = ast.parse((srt / "arg_groups/fields/model.py").read_text())
    fp4_cache = srt / "layers/quantization/fp4_kv_cache_quant_method.py"
    return {
        **_sglang_methods(srt / "layers/quantization/__init__.py"),
        "choices": _strings(choices["QUANTIZATION_CHOICES"]),
        "kv": _field(fields, "kv_cache_dtype"),
        "kv recipes": _keys(_assigned(fp4_cache)["KV_CACHE_QUANT_REGISTRY"]),
        "kv reserved": _compared(fp4_cache, "resolve_kv_cache_quant"),
        "dtype": _field(fields, "dtype"),
        "expert backends": _strings(choices["MOE_RUNNER_BACKEND_CHOICES"]),
        "fp8 gemm backends": _strings(choices["FP8_GEMM_RUNNER_BACKEND_CHOICES"]),
        "fp4 gemm backends": _strings(choices["FP4_GEMM_RUNNER_BACKEND_CHOICES"]),
        "chains": {
            "fp8 blocks": _chain(srt / "layers/quantization/fp8_utils.py", "_dispatch_auto_backend"),
            "fp8 start": _chain(srt / "layers/quantization/fp8_utils.py", "initialize_fp8_gemm_config"),
            "fp4 start": _chain(srt / "layers/quantization/fp4_utils.py", "initialize_fp4_gemm_config"),
        },
    }


def _sglang_methods(file: Path) -> Lists:
    """The registry, what each platform adds to it under which condition, and what the CPU takes."""
    tree = ast.parse(file.read_text())
    everywhere = dict(pair for node in tree.body for pair in _targets(node))
    added: dict[str, list[str]] = {}
    for node in tree.body:
        if isinstance(node, ast.If):
            keys = [key for each in ast.walk(node) if isinstance(each, ast.Dict) for key in _keys(each)]
            added[ast.unparse(node.test)] = keys
    return {
        "methods": _keys(everywhere["BASE_QUANTIZATION_METHODS"]),
        "added": added,
        "cpu": _keys(everywhere["CPU_QUANTIZATION_METHODS"]),
    }


def _field(tree: ast.Module, name: str) -> list[str]:
    """The choices of a command-line field, which stand in its annotation."""
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == name:
            for each in ast.walk(node.annotation):
                if isinstance(each, ast.keyword) and each.arg == "choices":
                    return _strings(each.value)
    raise LookupError(f"no choices of {name}")


def _function(file: Path, name: str) -> ast.FunctionDef:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node
    raise LookupError(f"no {name} in {file}")


def _compared(file: Path, function: str) -> list[str]:
    """Strings that a function compares its argument with."""
    return [
        each.value
        for node in ast.walk(_function(file, function))
        if isinstance(node, ast.Compare)
        for each in node.comparators
        if isinstance(each, ast.Constant) and isinstance(each.value, str)
    ]


def _chain(file: Path, function: str) -> list[list[str]]:
    """[condition, what follows] of every branch in order; an else has the condition "else"."""

    def walk(nodes: list[ast.stmt]) -> Iterator[list[str]]:
        for node in nodes:
            if not isinstance(node, ast.If):
                continue
            for test, body in ((ast.unparse(node.test), node.body), ("else", node.orelse)):
                if body and not (test == "else" and isinstance(body[0], ast.If)):
                    said = [ast.unparse(each) for each in body if isinstance(each, ast.Return | ast.Assign)]
                    if said:
                        yield [test, "; ".join(said)]
                yield from walk(body)

    return list(walk(_function(file, function).body))


# ---- what both are read with


def _targets(node: ast.stmt) -> list[tuple[str, ast.expr]]:
    if isinstance(node, ast.Assign):
        return [(each.id, node.value) for each in node.targets if isinstance(each, ast.Name)]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
        return [(node.target.id, node.value)]
    return []


def _assigned(file: Path) -> dict[str, ast.expr]:
    return {name: value for node in ast.parse(file.read_text()).body for name, value in _targets(node)}


def _strings(node: ast.expr) -> list[str]:
    return [
        each.value
        for each in ast.walk(node)
        if isinstance(each, ast.Constant) and isinstance(each.value, str)
    ]


def _keys(node: ast.expr) -> list[str]:
    if not isinstance(node, ast.Dict):
        raise LookupError("not a dictionary")
    return [key.value for key in node.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]


# ---- the snapshot


def snapshot() -> dict[str, dict[str, Lists]]:
    """engine → version → {"sha256", "lists"}, as committed."""
    kept: dict[str, dict[str, Lists]] = json.loads(SNAPSHOT.read_text())
    return kept


def main(arguments: list[str]) -> int:
    kept = snapshot() if SNAPSHOT.exists() else {}
    changed = False
    for (engine, version), package in wheels().items():
        lists = read(engine, package)
        now = {"sha256": fingerprint(lists), "lists": lists}
        same = kept.get(engine, {}).get(version) == now
        changed |= not same
        print(f"{engine} {version}: {'as committed' if same else 'differs'}")
        kept.setdefault(engine, {})[version] = now
    if "--write" in arguments:
        SNAPSHOT.write_text(json.dumps(kept, indent=1) + "\n")
        return 0
    return int(changed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
