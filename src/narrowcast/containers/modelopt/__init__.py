"""The ModelOpt container, which NVIDIA's Model Optimizer writes and TensorRT-LLM, vLLM and SGLang load."""

from narrowcast.containers.container import CacheSpelling, Container
from narrowcast.containers.modelopt.config import BESIDE, document
from narrowcast.containers.modelopt.read import claims, read
from narrowcast.containers.modelopt.spellings import NAME, spelling

CONTAINER = Container(
    name=NAME,
    title="ModelOpt (NVIDIA Model Optimizer)",
    claims=claims,
    read=read,
    spelling=spelling,
    document=document,
    cache=CacheSpelling({"k": ".k_proj.k_scale", "v": ".v_proj.v_scale"}, shape=()),
    cache_schemes=("fp8", "nvfp4"),
    files=(BESIDE,),
)
