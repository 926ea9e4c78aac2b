"""What a file is when it is not safetensors: the mix-ups that happen, recognised by their first bytes.

A safetensors file has no magic number: its first eight bytes are a length. Read as a length, the first bytes
of any text or archive are absurdly large, which says nothing to the person who has a pickle, a GGUF or the
pointer file of a repository cloned without its large files. So the usual suspects are named first, each with
its way out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WrongFile:
    """What the file is, the bytes that gave it away, and what to do."""

    what: str
    seen: str
    remedy: str


_CONVERT = "load it with the tool that wrote it and save it as safetensors (transformers: save_pretrained)"
_FETCH = (
    "the download was answered with a page, not with the file: log in or correct the address, and repeat it"
)

# First bytes, what they mean, remedy.
_SIGNATURES: tuple[tuple[bytes, str, str], ...] = (
    (rb"PK\x03\x04", "a zip archive, most likely a PyTorch pickle checkpoint (.bin, .pt, .pth)", _CONVERT),
    (rb"\x80[\x02-\x05][\}\]c(\x8a\x95]", "a pickle, most likely an old PyTorch checkpoint", _CONVERT),
    (rb"GGUF", "a GGUF file", "use the safetensors original of the model, or dequantize the GGUF first"),
    (
        rb"version https://git-lfs",
        "a git-LFS pointer, not the file itself",
        "run `git lfs pull` in the repository",
    ),
    (rb"\s*(?i:<!doctype html|<html)", "an HTML page", _FETCH),
    (rb"\s*<\?xml", "an XML text", _FETCH),
    (rb"\x89HDF\r\n", "an HDF5 file (TensorFlow or Keras weights)", _CONVERT),
    (rb"\x93NUMPY", "a numpy .npy file", "give the checkpoint that the array came from"),
    (rb"\x1f\x8b", "a gzip archive", "unpack it first"),
    (
        rb'\s*\{\s*"',
        "a JSON text (an index, a config, or an error message of a server)",
        "give the weights file or its directory",
    ),
)


def wrong_file(head: bytes) -> WrongFile | None:
    """Name what starts with these bytes (512 are enough), or None when it may be a safetensors file."""
    if not head:
        return WrongFile("the file is empty", "0 bytes", "download or copy the file again")
    for pattern, what, remedy in _SIGNATURES:
        if re.match(pattern, head):
            size = re.search(rb"^size (\d+)", head, re.MULTILINE) if b"git-lfs" in head else None
            seen = f"first bytes {head[:12]!r}" + (f", standing for {int(size[1])} bytes" if size else "")
            return WrongFile(what, seen, remedy)
    return None
