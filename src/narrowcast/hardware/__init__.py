"""Hardware: accelerators and what engines make of a checkpoint on them, as rows of data with a version and a source.

    gpus             what each accelerator is and multiplies natively
    engines          container × scheme × accelerator → kernels in order, arithmetic, or the refusal and its reason
    tensor_parallel  which splits keep blocks, groups and packed words whole
    caches           which names of KV cache scales each engine reads
    overflow         model families whose activations leave the range of fp16

What is not known is None, or said; nothing here is measured on the machine.
"""
