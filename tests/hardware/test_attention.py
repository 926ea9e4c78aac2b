"""Attention: our rows against vLLM's own choice, which runs from its source, and against what its lines say."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import vllm_selection as vllm

from narrowcast.errors import UsageError
from narrowcast.hardware.attention import _order, _table, _tried, attention_path
from narrowcast.hardware.attention.row import Layout
from narrowcast.hardware.cache_modes import CACHE_MODES
from narrowcast.hardware.engines import ENGINES
from narrowcast.hardware.gpus import GPU, gpus

SNAPSHOT = Path(__file__).with_name("vllm_attention.txt")
BOARDS = {75: "t4", 80: "a100", 89: "l4", 90: "h100", 100: "b200", 103: "b300", 120: "rtx 5090"}
TABLE = _table("vllm")


def _names(gpu: GPU, layout: Layout, mode: str, head: int, what: str) -> list[str]:
    found, _ = _tried(
        TABLE, _order(TABLE, layout, gpu, CACHE_MODES[mode]) or (),
        lambda row: row.lacks(gpu, mode, head, what == "sliding", what == "sinks"),
    )  # fmt: skip
    return [row.name for row in found]


def test_rows_choose_as_vllm_chose() -> None:
    """1232 questions by capability, layout, mode, head size, sinks and windows: the same backends in the same order."""
    asked = 0
    for line in SNAPSHOT.read_text().splitlines():
        if line.startswith("#"):
            continue
        question, _, names = line.partition(":")
        sm, layout, word, head, what = question.split()
        gpu, mode = gpus[BOARDS[int(sm)]], CACHE_MODES[word].name
        assert _names(gpu, layout, mode, int(head), what) == names.split(), question
        asked += 1
    assert asked == len(list(vllm.grid())) == 1232


def _source() -> Path:
    found = vllm.source()
    if found is None:
        pytest.skip("vLLM's source is not here: engines/setup.sh installs its CPU build")
    return found


def test_vllm_still_chooses_so() -> None:
    """The answers that are kept here are those of the vLLM that is installed."""
    _source()
    kept = [line for line in SNAPSHOT.read_text().splitlines() if not line.startswith("#")]
    assert list(vllm.lines()) == kept


# Backends whose list is not asked for above: the modes of our rows are the list's.
_OTHER = {
    "rocm_attn.py": ("RocmAttentionBackend", "ROCM_ATTN", "mi300x"),
    "rocm_aiter_fa.py": ("AiterFlashAttentionBackend", "ROCM_AITER_FA", "mi300x"),
    "rocm_aiter_unified_attn.py": ("RocmAiterUnifiedAttentionBackend", "ROCM_AITER_UNIFIED_ATTN", "mi300x"),
    "triton_attn.py": ("TritonAttentionBackend", "TRITON_ATTN", "mi300x"),
    "turboquant_attn.py": ("TurboQuantAttentionBackend", "TURBOQUANT", "mi300x"),
    "ultraquant_attn.py": ("UltraQuantAttentionBackend", "ULTRAQUANT", "mi300x"),
    "mla/rocm_aiter_mla.py": ("AiterMLABackend", "ROCM_AITER_MLA", "mi300x"),
    "mla/rocm_aiter_mla_sparse.py": ("ROCMAiterMLASparseBackend", "ROCM_AITER_MLA_SPARSE", "mi300x"),
    "mla/triton_mla.py": ("TritonMLABackend", "TRITON_MLA", "mi300x"),
    "cpu_attn.py": ("CPUAttentionBackend", "CPU_ATTN", "cpu"),
    "mla/cpu_mla.py": ("CPUMLABackend", "CPU_MLA", "cpu"),
}


def _listed(tree: ast.Module, name: str, field: str) -> list[str]:
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name).body
    for node in body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == field:
            assert node.value is not None
            return list(ast.literal_eval(node.value))
        if isinstance(node, ast.FunctionDef) and node.name == field:
            last = node.body[-1]
            return list(ast.literal_eval(last.value)) if isinstance(last, ast.Return) and last.value else []
    return []


@pytest.mark.parametrize("file", list(_OTHER))
def test_modes_are_those_of_the_source(file: str) -> None:
    name, ours, board = _OTHER[file]
    tree = ast.parse((_source() / "v1/attention/backends" / file).read_text())
    said = {CACHE_MODES[word].name for word in _listed(tree, name, "supported_kv_cache_dtypes")}
    rows = [row for row in TABLE.rows(ours) if row.reach.holds(gpus[board])]
    assert {mode for row in rows for mode in row.modes} == said
    heads = _listed(tree, name, "get_supported_head_sizes")
    assert set(heads) == {size for row in rows for size in row.heads}


def test_amd_order_is_that_of_the_source() -> None:
    """The names that the function for AMD appends, RDNA's insertion aside, in its order."""
    tree = ast.parse((_source() / "platforms/rocm.py").read_text())
    function = next(
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name == "_get_backend_priorities"
    )
    calls = [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("append",)
    ]
    calls.sort(key=lambda node: node.lineno)
    names = [node.args[0].attr for node in calls if isinstance(node.args[0], ast.Attribute)]
    assert tuple(names) == _order(TABLE, "heads", gpus["mi300x"], CACHE_MODES["bf16"])
    returned = [ast.unparse(node) for node in ast.walk(function) if isinstance(node, ast.Return)]
    assert any("ROCM_AITER_MLA_SPARSE]" in line for line in returned)
    assert any("ROCM_AITER_MLA, " in line and ".TRITON_MLA, " in line for line in returned)


def test_refusals_are_vllms_words() -> None:
    """What a backend raises is in its source, the GPU's name and line breaks aside."""
    flat = {
        name: re.sub(r'"\s*f?"', "", (_source() / "v1/attention" / name).read_text())
        for name in (
            "backends/triton_attn.py",
            "backends/mla/triton_mla.py",
            "backends/cpu_attn.py",
            "backend.py",
        )
    }
    assert "FP8 KV cache is not supported by the Triton attention backend" in flat["backends/triton_attn.py"]
    assert "native FP8 (fp8e4nv) requires SM89+" in flat["backends/triton_attn.py"]
    assert "FP8 KV cache is not supported by the Triton MLA backend" in flat["backends/mla/triton_mla.py"]
    assert "FP8 KV cache requires head_size divisible by 32 on CPU." in flat["backends/cpu_attn.py"]
    from narrowcast.hardware.attention import row as words

    for said in (words.CAPABILITY, words.MODE, words.HEAD, words.SINKS, words.SLIDING):
        assert said in flat["backend.py"]
    layer = (_source() / "model_executor/layers/attention/attention.py").read_text()
    assert 'assert self.kv_cache_dtype in {"fp8", "fp8_e4m3"}' in layer


# Read out of the 0.32.0 wheel: GPU, mode, kind, head size → backend, decode, prefill; and where it says so.
FACTS = [
    # fa_utils.py:260 FA3 on 9.x takes FP8; attention.py:468 quantizes the query; flash_attn.py:1158
    ("h100", "fp8", "full", 128, "FLASH_ATTN", "fp8", "fp8"),
    ("h200", "fp8", "full", 64, "FLASH_ATTN", "fp8", "fp8"),
    # flash_attn.py:1150 FA4 on 9.x with heads of 512 dequantizes in the kernel and takes a 16-bit query
    ("h100", "fp8", "full", 512, "FLASH_ATTN", "bf16: dequantized", "bf16: dequantized"),
    # flashinfer.py:1016-1028 only 9.0's prefill and 10.x take an FP8 query
    ("a100", "fp8", "full", 128, "FLASHINFER", "bf16: dequantized", "bf16: dequantized"),
    ("a100", "fp8_e5m2", "full", 128, "FLASHINFER", "bf16: dequantized", "bf16: dequantized"),
    ("l4", "fp8", "full", 128, "FLASHINFER", "bf16: dequantized", "bf16: dequantized"),
    ("rtx 4090", "fp8", "sliding", 256, "FLASHINFER", "bf16: dequantized", "bf16: dequantized"),
    ("h100", "fp8_e5m2", "full", 128, "FLASHINFER", "bf16: dequantized", "fp8"),
    ("b200", "fp8", "full", 128, "FLASHINFER", "fp8", "fp8"),
    ("rtx 5090", "fp8", "full", 128, "FLASHINFER", "bf16: dequantized", "bf16: dequantized"),
    # flashinfer.py:1030 NVFP4: FP8 query on 10.x, the model's on the FA2 path of 8.x, 9.0 and 12.x
    ("b200", "nvfp4", "full", 128, "FLASHINFER", "fp8", "fp8"),
    ("b200", "nvfp4_4over6", "full", 128, "FLASHINFER", "fp8", "fp8"),
    ("h100", "nvfp4", "full", 128, "FLASHINFER", "bf16: dequantized", "bf16: dequantized"),
    ("rtx pro 6000", "nvfp4", "full", 128, "FLASHINFER", "bf16: dequantized", "bf16: dequantized"),
    # triton_attn.py:529 quantizes the query on CUDA; ops/triton_unified_attention.py:52 multiplies FP8 by FP8
    ("l4", "fp8", "full", 80, "TRITON_ATTN", "fp8", "fp8"),
    ("rtx 5090", "fp8", "full", 96, "TRITON_ATTN", "fp8", "fp8"),
    # attention.py:475 not for scales of a token and head; ops/triton_unified_attention.py:55 casts to the query's dtype
    ("a100", "int8_per_token_head", "full", 128, "TRITON_ATTN", "bf16: dequantized", "bf16: dequantized"),
    ("h100", "fp8_per_token_head", "full", 128, "TRITON_ATTN", "bf16: dequantized", "bf16: dequantized"),
    ("t4", "int8_per_token_head", "full", 128, "TRITON_ATTN", "fp16: dequantized", "fp16: dequantized"),
    # mla/triton_mla.py:222 decodes and keeps the query; the others' is quantized: mla_attention.py:3323
    ("l4", "fp8", "latent", 576, "TRITON_MLA", "bf16: dequantized", "bf16: dequantized"),
    ("h100", "fp8", "latent", 576, "FLASHMLA", "fp8", "bf16"),
    ("h100", "auto", "latent", 576, "FLASH_ATTN_MLA", "bf16", "bf16"),
    ("b200", "fp8", "latent", 576, "FLASHINFER_MLA", "fp8", "bf16"),
    ("rtx 5090", "fp8", "latent", 576, "TRITON_MLA", "bf16: dequantized", "bf16: dequantized"),
    # rocm_attn.py:416 keeps the query wide; triton_attn.py:529 quantizes it on CUDA alone
    ("mi300x", "fp8", "full", 128, "ROCM_ATTN", "bf16: dequantized", "bf16: dequantized"),
    ("mi355x", "fp8", "full", 512, "TRITON_ATTN", "bf16: dequantized", "bf16: dequantized"),
    # cpu_attn.py:540
    ("cpu", "fp8", "full", 64, "CPU_ATTN", "bf16: dequantized", "bf16: dequantized"),
    ("v100", "auto", "full", 128, "TRITON_ATTN", "fp16", "fp16"),
    ("a100", "auto", "full", 128, "FLASH_ATTN", "bf16", "bf16"),
]


@pytest.mark.parametrize(("board", "mode", "kind", "dim", "backend", "decode", "prefill"), FACTS)
def test_arithmetic(
    board: str, mode: str, kind: str, dim: int, backend: str, decode: str, prefill: str
) -> None:
    path = attention_path("vllm", gpus[board], mode, kind, dim)
    assert path.refusal is None
    assert path.backends[0] == backend
    assert (path.arithmetic, path.prefill) == (decode, prefill)
    assert path.low_precision is (decode == "fp8")


REFUSED = [
    ("a100", "fp8", "full", 80, "requires SM89+"),  # triton_attn.py:496, after FlashInfer has no heads of 80
    ("t4", "fp8", "full", 128, "requires SM89+"),
    ("a100", "fp8", "latent", 576, "Triton MLA backend"),  # mla/triton_mla.py:205
    ("b200", "fp8_e5m2", "full", 128, "AssertionError"),  # attention.py:515
    ("l4", "fp8_e5m2", "full", 80, "AssertionError"),
    ("h100", "nvfp4", "full", 64, "head_size not supported"),  # flashinfer.py:556
    ("h100", "nvfp4_4over6", "full", 128, "kv_cache_dtype not supported"),  # flashinfer.py:533
    ("h100", "fp8_e5m2", "latent", 576, "No valid attention backend found"),
    (
        "h100",
        "ultraquant_4bit",
        "full",
        128,
        "No valid attention backend found",
    ),  # platforms/cuda.py: not in the list
    ("cpu", "fp8", "full", 80, "divisible by 32 on CPU"),  # cpu_attn.py:531
    ("cpu", "fp8", "latent", 576, "kv_cache_dtype not supported"),
    ("h100", "fp4_mx_block16", "full", 128, "vLLM has no fp4_mx_block16 cache"),
]


@pytest.mark.parametrize(("board", "mode", "kind", "dim", "said"), REFUSED)
def test_refusals(board: str, mode: str, kind: str, dim: int, said: str) -> None:
    path = attention_path("vllm", gpus[board], mode, kind, dim)
    assert path.refusal is not None
    assert said in path.refusal
    assert not path.backends
    assert not path.low_precision


def test_the_sentence_tells_bytes_from_arithmetic() -> None:
    assert attention_path("vllm", gpus["a100"], "fp8", "full", 128).notes[0] == (
        "bf16 attention over an fp8_e4m3 cache: half the bytes, the same arithmetic"
    )
    # int8 with a scale of four bytes for each head: 132 of 256 bytes.
    assert (
        "52% of the bytes"
        in attention_path("vllm", gpus["a100"], "int8_per_token_head", "full", 128).notes[0]
    )
    assert (
        "multiplied in 8 bits" in attention_path("vllm", gpus["h100"], "fp8", "full", 128).notes[0]
    )  # fmt: skip


def test_backends_that_would_fail_later_are_not_named() -> None:
    """Triton comes behind FlashInfer on an A100, and has no FP8 before 8.9."""
    assert attention_path("vllm", gpus["a100"], "fp8", "full", 128).backends == ("FLASHINFER",)


def test_sinks_and_windows_change_the_backend() -> None:
    """gpt-oss on an A100: FlashAttention 2 and FlashInfer have no sinks there."""
    assert attention_path("vllm", gpus["a100"], "auto", "full", 64, sinks=True).backends == ("TRITON_ATTN",)
    refused = attention_path("vllm", gpus["a100"], "turboquant_k8v4", "sliding", 64)
    assert refused.refusal is not None
    assert "sliding window not supported" in refused.refusal


def test_sparse_latents() -> None:
    path = attention_path("vllm", gpus["h200"], "fp8", "latent", 576, sparse=True)
    assert path.backends[0] == "FLASHMLA_SPARSE"
    assert "stored as fp8_ds_mla" in " ".join(path.notes)
    assert attention_path("vllm", gpus["b200"], "fp8", "latent", 576, sparse=True).arithmetic == "fp8"


def test_dense_latents_have_no_layout_of_sparse_ones() -> None:
    """v1/attention/backend.py: a backend for chosen tokens alone refuses a model that chooses none."""
    for gpu in ("h200", "b200"):
        for mode in ("fp8_ds_mla", "nvfp4_ds_mla"):
            path = attention_path("vllm", gpus[gpu], mode, "latent", 576)
            assert path.refusal is not None
            assert path.backends == ()
    assert attention_path("vllm", gpus["h200"], "fp8_ds_mla", "latent", 576, sparse=True).refusal is None


def test_states_keep_no_keys() -> None:
    path = attention_path("vllm", gpus["a100"], "fp8", "state", 0)
    assert path.refusal is None
    assert "no mode of the KV cache touches it" in path.notes[0]


def test_packages_are_named() -> None:
    path = attention_path("vllm", gpus["mi300x"], "fp8", "latent", 576)
    assert path.backends == ("TRITON_MLA",)
    assert "ROCM_AITER_MLA would come before" in " ".join(path.notes)
    assert "E4M3FNUZ" in " ".join(path.notes)


SGLANG = [
    # arg_groups/model_override_base.py:305-345 default backends; the arithmetic by each backend's casts of the query
    ("h100", "fp8_e4m3", "full", 128, "fa3", "fp8"),  # flashattention_backend.py:1436
    (
        "h100",
        "fp8_e4m3",
        "latent",
        576,
        "fa3 (latent)",
        "bf16: dequantized",
    ),  # :2350 get_key_buffer().to(q.dtype)
    ("b200", "fp8_e4m3", "full", 128, "trtllm_mha", "fp8"),  # trtllm_mha_backend.py:365
    (
        "b200",
        "fp8_e4m3",
        "latent",
        576,
        "flashinfer (latent)",
        "bf16: dequantized",
    ),  # flashinfer_mla_backend.py:822
    (
        "a100",
        "fp8_e5m2",
        "full",
        128,
        "flashinfer",
        "bf16: dequantized",
    ),  # flashinfer_backend.py:1605 q_data_type
    ("l4", "auto", "full", 128, "flashinfer", "bf16"),
    ("mi300x", "auto", "full", 128, "aiter", "bf16"),
]


@pytest.mark.parametrize(("board", "mode", "kind", "dim", "backend", "arithmetic"), SGLANG)
def test_sglang(board: str, mode: str, kind: str, dim: int, backend: str, arithmetic: str) -> None:
    path = attention_path("sglang", gpus[board], mode, kind, dim)
    assert (path.backends[0], path.arithmetic) == (backend, arithmetic)


def test_sglang_refuses_by_gpu() -> None:
    said = attention_path("sglang", gpus["h100"], "nvfp4", "full", 128).refusal
    assert said is not None
    assert "requires Blackwell SM100 or SM120" in said
    said = attention_path("sglang", gpus["h100"], "mxfp8", "full", 128).refusal
    assert said is not None
    assert "requires an SM100+ (Blackwell) GPU" in said
    assert attention_path("sglang", gpus["a100"], "auto", "full", 64, sinks=True).backends == ("triton",)


def test_what_is_not_known_is_said() -> None:
    assert attention_path("tensorrt-llm", gpus["h100"], "fp8", "full", 128).arithmetic == "unknown"
    tpu = attention_path("vllm", gpus["tpu v6e"], "auto", "full", 128)
    assert tpu.arithmetic == "unknown"
    assert tpu.refusal is None
    assert "no backends known here" in tpu.notes[0]
    with pytest.raises(UsageError, match="unknown mode of the KV cache"):
        attention_path("vllm", gpus["h100"], "fp9", "full", 128)


def test_every_engine_and_mode_has_an_answer() -> None:
    for engine in ENGINES:
        for gpu in gpus.values():
            for mode in CACHE_MODES:
                for kind, dim in (("full", 128), ("sliding", 64), ("latent", 576), ("state", 0)):
                    path = attention_path(engine, gpu, mode, kind, dim)
                    assert path.refusal or path.backends or path.notes, (engine, gpu.name, mode, kind)
