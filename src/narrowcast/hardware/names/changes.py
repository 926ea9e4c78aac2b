"""What newer wheels changed against the first version in VERSIONS, whose order of kernels the rows follow.

Rows of kernels stay at one version, so that an answer names what it is about. What a newer wheel does otherwise is
listed here, but for new names, whose rows say since when; a test compares this list with the wheels' own, both ways.
"""

from __future__ import annotations

from narrowcast.hardware.names import Change

_V = ("vllm", "0.33.0")

CHANGES: tuple[Change, ...] = (
    Change(
        *_V, "_POSSIBLE_FP8_KERNELS CPU", added=("CPUFp8ChannelWise",), means="FP8 per channel on a CPU with "
        "AMX: weight-only, where 0.32 emulates",
    ),
    Change(*_V, "_POSSIBLE_MXFP4_KERNELS ROCM", added=("Rdna3W4A8MxFp4",), means="consumer cards (RDNA3)"),
    Change(*_V, "_POSSIBLE_MXFP4_KERNELS XPU", added=("TorchMxFp4",), means="not among the rows"),
    Change(
        *_V, "_POSSIBLE_MXFP8_KERNELS CUDA", added=("TorchMxFp8",), means="last in the list, behind Marlin and "
        "emulation: chosen only by --linear-backend torch",
    ),
    Change(*_V, "_POSSIBLE_MXFP8_KERNELS XPU", added=("TorchMxFp8",), means="not among the rows"),
    Change(
        *_V, "backend kernels torch", added=("TorchMxFp4", "TorchMxFp8"),
        means="torch.scaled_mm for MX formats",
    ),
    Change(
        *_V, "kv backends auto", added=("FlashAttnMLASparseFA4",), means="another backend of sparse attention",
    ),
    Change(*_V, "kv backends bfloat16", added=("FlashAttnMLASparseFA4",), means="another backend of sparse attention"),
)  # fmt: skip
