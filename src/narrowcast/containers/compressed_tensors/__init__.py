"""The compressed-tensors container, which llm-compressor writes and vLLM, SGLang and transformers load."""

from narrowcast.containers.compressed_tensors.config import NAME, document
from narrowcast.containers.compressed_tensors.read import claims, read
from narrowcast.containers.compressed_tensors.spellings import spelling
from narrowcast.containers.container import CacheSpelling, Container

CONTAINER = Container(
    name=NAME,
    title="compressed-tensors (llm-compressor)",
    claims=claims,
    read=read,
    spelling=spelling,
    document=document,
    cache=CacheSpelling({"q": ".q_scale", "k": ".k_scale", "v": ".v_scale"}),
    cache_schemes=("fp8", "fp8_head"),
)
