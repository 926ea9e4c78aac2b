"""The Quark container, which AMD's quantizer writes and vLLM and SGLang load."""

from narrowcast.containers.container import CacheSpelling, Container
from narrowcast.containers.quark.config import document
from narrowcast.containers.quark.read import claims, read
from narrowcast.containers.quark.spellings import NAME, spelling

CONTAINER = Container(
    name=NAME,
    title="Quark (AMD)",
    claims=claims,
    read=read,
    spelling=spelling,
    document=document,
    cache=CacheSpelling({which: f".{which}_proj.output_scale" for which in "qkv"}, shape=()),
    cache_schemes=("fp8",),
)
