"""vLLM's own choice of an attention backend, taken from its source without importing it.

Its methods that say what a backend takes are cut out of the syntax trees, with their classes, and run over a stand-in
for the platform: a capability, every FlashAttention that this capability has, and FlashInfer's downloads reachable.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
KEPT = {
    "get_supported_head_sizes", "supports_head_size", "supports_dtype", "supports_kv_cache_dtype",
    "supports_block_size", "is_mla", "supports_sink", "is_sparse", "supports_per_head_quant_scales",
    "supports_sliding_window", "supports_attn_type", "supports_compute_capability", "supports_combination",
    "validate_configuration", "supports_mm_prefix", "get_supported_kernel_block_sizes",
}  # fmt: skip
FUNCTIONS = {
    "v1/attention/backends/fa_utils.py": (
        "get_flash_attn_version", "uses_fa4_hd256_kernel", "_fa4_hd256_fallback_reason", "flash_attn_supports_mla",
        "flash_attn_supports_kv_cache_dtype", "flash_attn_supports_sinks",
    ),
    "v1/attention/backends/flashinfer.py": ("_nvfp4_kv_on_fa2",),
    "v1/attention/ops/flashmla.py": ("is_flashmla_dense_supported", "is_flashmla_sparse_supported"),
    "utils/flashinfer.py": ("supports_trtllm_attention",),
    "utils/torch_utils.py": ("is_quantized_kv_cache",),
    "platforms/cuda.py": ("_get_backend_priorities",),
}  # fmt: skip
# The priority list's name → the class of that backend.
CLASSES = {
    "FLASH_ATTN": "FlashAttentionBackend", "FLASHINFER": "FlashInferBackend", "TRITON_ATTN": "TritonAttentionBackend",
    "FLEX_ATTENTION": "FlexAttentionBackend", "TURBOQUANT": "TurboQuantAttentionBackend",
    "FLASHINFER_MLA": "FlashInferMLABackend", "TOKENSPEED_MLA": "TokenspeedMLABackend",
    "CUTLASS_MLA": "CutlassMLABackend", "FLASH_ATTN_MLA": "FlashAttnMLABackend", "FLASHMLA": "FlashMLABackend",
    "TRITON_MLA": "TritonMLABackend", "FLASHMLA_SPARSE": "FlashMLASparseBackend",
    "FLASHINFER_MLA_SPARSE": "FlashInferMLASparseTRTLLMBackend", "FLASH_ATTN_MLA_SPARSE": "FlashAttnMLASparseBackend",
    "FLASHINFER_MLA_SPARSE_SM90": "FlashInferMLASparseSM90Backend",
    "FLASHINFER_MLA_SPARSE_SM120": "FlashInferMLASparseSM120Backend",
}  # fmt: skip
BASES = {"AttentionBackend", "MLACommonBackend", "_FlashInferMLASparseBackendBase"}
WANTED = {*CLASSES.values(), *BASES}


class Capability(NamedTuple):
    major: int
    minor: int


def source() -> Path | None:
    """Where vLLM's source lies: the engine environment's CPU build has all of it."""
    found = sorted(ROOT.glob(".venv-engine/lib/python3*/site-packages/vllm"))
    return found[0] if found else None


class _NoImports(ast.NodeTransformer):
    """Without imports and annotations, whose names this file's namespace gives, or nobody needs."""

    def visit_Import(self, node: ast.Import) -> ast.AST:
        return ast.Pass()

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST:
        return ast.Pass()

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        kept = ("classmethod", "staticmethod")
        node.decorator_list = [
            each for each in node.decorator_list if isinstance(each, ast.Name) and each.id in kept
        ]
        self.generic_visit(node)
        return node


def _classes(tree: ast.Module, known: set[str]) -> Iterator[ast.ClassDef]:
    for node in tree.body:
        if not isinstance(node, ast.ClassDef) or node.name not in WANTED:
            continue
        body: list[ast.stmt] = [ast.Pass()]
        for each in node.body:
            if isinstance(each, ast.FunctionDef) and each.name in KEPT:
                body.append(each)
            elif (
                isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) and each.value is not None
                and each.target.id.startswith("supported_")
            ):  # fmt: skip
                body.append(ast.Assign([each.target], each.value))
        bases = [base for base in node.bases if isinstance(base, ast.Name) and base.id in known]
        node.body, node.bases, node.keywords, node.decorator_list = body, bases, [], []  # type: ignore[assignment]
        known.add(node.name)
        yield node


def _platform(sm: int) -> SimpleNamespace:
    capability = Capability(*divmod(sm, 10))
    return SimpleNamespace(
        get_device_capability=lambda: capability, is_xpu=lambda: False, is_rocm=lambda: False, is_cuda=lambda: True,
        is_device_capability=lambda asked: sm == asked, has_device_capability=lambda asked: sm >= asked,
        is_device_capability_family=lambda asked: sm // 10 == asked // 10,
    )  # fmt: skip


def _flash_attn(sm: int, version: int) -> bool:
    """vllm_flash_attn's own answers with everything compiled: 2 from 8.0, 3 on 9.x, 4 on 9.x to 11.x."""
    return {2: sm >= 80, 3: sm // 10 == 9, 4: sm // 10 in (9, 10, 11)}[version]


def _namespace(sm: int) -> dict[str, Any]:
    torch = SimpleNamespace(float16="float16", bfloat16="bfloat16", float32="float32", dtype=str)
    types = SimpleNamespace(
        DECODER="decoder", ENCODER="encoder", ENCODER_ONLY="encoder_only", ENCODER_DECODER="encoder_decoder"
    )
    config = SimpleNamespace(
        model_config=None, cache_config=SimpleNamespace(cache_dtype="auto"),
        attention_config=SimpleNamespace(flash_attn_version=None),
        parallel_config=SimpleNamespace(prefill_context_parallel_size=1, decode_context_parallel_size=1),
    )  # fmt: skip
    names = SimpleNamespace(**{name: name for name in CLASSES}, TRITON_FLASHINFER="", TRITON_FLASH_ATTN="")
    return {
        "torch": torch, "AttentionType": types, "AttentionBackendEnum": names, "DeviceCapability": Capability,
        "current_platform": _platform(sm), "envs": SimpleNamespace(VLLM_BATCH_INVARIANT=False),
        "is_fa_version_supported": lambda version: _flash_attn(sm, version),
        "fa_version_unsupported_reason": lambda version: None,
        "is_flash_attn_varlen_func_available": lambda: True, "has_nvidia_artifactory": lambda: True,
        "force_use_trtllm_attention": lambda: None, "get_current_vllm_config_or_none": lambda: config,
        "get_current_vllm_config": lambda: config, "config": config,
        "_is_flashmla_available": lambda: (True, None), "has_flashinfer_sparse_mla_sm120": lambda: True,
        "has_flashinfer_sm90_nope_mla": lambda: True, "MultipleOf": lambda base: base, "FA4_HD256_PAGE_SIZE": 128,
        "logger": SimpleNamespace(
            **dict.fromkeys(("warning_once", "info_once", "error"), lambda *a, **k: None),
        ),
    }  # fmt: skip


@cache
def _code() -> CodeType:
    """The classes and functions that choose, cut out of vLLM's source."""
    root = source()
    assert root is not None
    nodes: list[ast.stmt] = []
    for file, names in FUNCTIONS.items():
        tree = ast.parse((root / file).read_text())
        nodes += [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
    known: set[str] = set()
    attention = root / "v1/attention"
    for path in (
        attention / "backend.py", root / "model_executor/layers/attention/mla_attention.py",
        *sorted((attention / "backends").rglob("*.py")),
    ):  # fmt: skip
        nodes += _classes(ast.parse(path.read_text()), known)
    module = ast.fix_missing_locations(_NoImports().visit(ast.Module(nodes, [])))
    return compile(module, "vllm", "exec")


def selection(sm: int) -> dict[str, Any]:
    """vLLM's classes and functions as they answer on one capability."""
    space = _namespace(sm)
    exec(_code(), space)
    return space


def chosen(
    space: dict[str, Any], sm: int, layout: str, mode: str, head: int, sinks: bool, sliding: bool
) -> list[str]:
    """The names that vLLM finds valid, in its order."""
    capability = Capability(*divmod(sm, 10))
    space["config"].cache_config.cache_dtype = mode
    order = space["_get_backend_priorities"](layout != "heads", capability, None, mode, False, head)
    about = {
        "head_size": head, "dtype": "bfloat16", "kv_cache_dtype": mode, "block_size": None,
        "use_mla": layout != "heads", "has_sink": sinks, "use_sparse": layout == "sparse", "use_mm_prefix": False,
        "use_per_head_quant_scales": False, "device_capability": capability, "attn_type": "decoder",
        "has_sliding_window": sliding,
    }  # fmt: skip
    return [name for name in order if not space[CLASSES[name]].validate_configuration(**about)]


HEADER = textwrap.dedent("""\
    # vLLM 0.32.0's own answers, made by vllm_selection.py from its source. sm, layout, mode, head, asked: names.
    """)
MODES = (
    "auto", "fp8", "fp8_e5m2", "fp8_inc", "nvfp4", "nvfp4_4over6", "int8_per_token_head", "int4_per_token_head",
    "fp8_per_token_head", "turboquant_k8v4", "ultraquant_4bit",
)  # fmt: skip
LATENT_MODES = ("auto", "fp8", "fp8_e5m2", "nvfp4", "int8_per_token_head", "fp8_ds_mla", "nvfp4_ds_mla")
SPARSE_MODES = ("auto", "fp8", "fp8_ds_mla", "nvfp4_ds_mla")
SMS = (75, 80, 89, 90, 100, 103, 120)


def grid() -> Iterator[tuple[int, str, str, int, str]]:
    """What is asked: capability, layout, mode, head size, and whether there are sinks or windows."""
    for sm in SMS:
        for head in (64, 80, 128, 256, 512):
            for mode in MODES:
                for asked in ("plain", "sinks", "sliding"):
                    yield sm, "heads", mode, head, asked
        yield from ((sm, "latent", mode, 576, "plain") for mode in LATENT_MODES)
        yield from ((sm, "sparse", mode, 576, "plain") for mode in SPARSE_MODES)


def lines() -> Iterator[str]:
    """The snapshot's lines."""
    spaces = {sm: selection(sm) for sm in SMS}
    for sm, layout, mode, head, asked in grid():
        names = chosen(spaces[sm], sm, layout, mode, head, asked == "sinks", asked == "sliding")
        yield f"{sm} {layout} {mode} {head} {asked}: {' '.join(names)}".strip()


if __name__ == "__main__":
    print(HEADER + "\n".join(lines()))
