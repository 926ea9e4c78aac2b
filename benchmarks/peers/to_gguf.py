"""The same tensors as a BF16 GGUF, for llama.cpp's quantizer: python to_gguf.py MODEL OUT.gguf.

Not timed. The rows of q and k are not reordered as llama.cpp's own converter would: the file serves to be
quantized, not to be run.
"""

import json
import sys
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors import safe_open

LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
MODEL = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    """llama.cpp's name of a Llama tensor."""
    module = name.removesuffix(".weight")
    if module in MODEL:
        return f"{MODEL[module]}.weight"
    _, _, number, part = module.split(".", 3)
    return f"blk.{number}.{LAYER[part]}.weight"


def convert(source: Path, out: Path) -> None:
    """Write every tensor of ``source``: matrices as BF16, norms as FP32, as llama.cpp keeps them."""
    import torch

    config = json.loads((source / "config.json").read_text())
    writer = GGUFWriter(str(out), "llama", use_temp_file=False)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    for shard in sorted(source.glob("*.safetensors")):
        with safe_open(shard, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                tensor = file.get_tensor(name)
                if tensor.ndim == 1:
                    writer.add_tensor(gguf_name(name), tensor.float().numpy())
                else:
                    bits = tensor.view(torch.uint16).numpy().view(np.uint8)
                    writer.add_tensor(gguf_name(name), bits, raw_dtype=GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
