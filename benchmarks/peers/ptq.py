"""llm-compressor's model-free path, which streams shards through its observers: python ptq.py MODEL OUT
SCHEME WORKERS.

The same linears as narrowcast's default are quantized: embeddings and lm_head stay as they are.
"""

import sys

from llmcompressor import model_free_ptq

if __name__ == "__main__":
    model, out, scheme, workers = sys.argv[1:]
    ignore = ["lm_head", "re:.*embed_tokens"]
    model_free_ptq(model, out, scheme=scheme, ignore=ignore, max_workers=int(workers), device="cpu")
