"""torchao: tensor subclasses flattened into safetensors, which transformers saves and vLLM loads. Read only.

    module.weight  →  module._weight_qdata, module._weight_scale, ...      and in the metadata of the file
    "module.weight": {"_type": "Float8Tensor", "_data": {"block_size": [1, 4096], ...}, "_tensor_data_names": [...]}

The metadata names the class of every tensor, so nothing is inferred: a class that is not known here is refused by its
name. The config's quant_type is held against the classes.

Source: torchao 0.18 prototype/safetensors/, quantization/quantize_/workflows/, prototype/mx_formats/. Left out:
writing, for which compressed-tensors has more readers; tensors tiled for one kernel (Int4TilePackedTo4dTensor,
Int4PlainInt32Tensor, sparse ones); stacks of experts.
"""

from narrowcast.containers.container import Container
from narrowcast.containers.torchao.read import claims, read
from narrowcast.containers.torchao.spellings import NAME

CONTAINER = Container(name=NAME, title="torchao safetensors", claims=claims, read=read)
