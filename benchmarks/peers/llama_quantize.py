"""llama.cpp's own quantizer: python llama_quantize.py IN.gguf OUT.gguf Q8_0|Q4_0 THREADS.

Embeddings and output stay BF16, so that the same tensors are quantized as everywhere else in the comparison.
"""

import sys

import llama_cpp

TYPES = {"Q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, "Q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0}
BF16 = 30  # ggml's type number

if __name__ == "__main__":
    source, out, name, threads = sys.argv[1:]
    options = llama_cpp.llama_model_quantize_default_params()
    options.nthread = int(threads)
    options.ftype = TYPES[name]
    options.token_embedding_type = BF16
    options.output_tensor_type = BF16
    if llama_cpp.llama_model_quantize(source.encode(), out.encode(), options) != 0:
        sys.exit("llama.cpp could not quantize")
