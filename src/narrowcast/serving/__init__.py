"""Serving: what will run on which GPU, how fast it can be at most, what fits, and the command that serves it.

    served     a model as engines load it: groups of matrices with their schemes and bytes, from headers or a config
    loading    from files, a config or a hub id to one; headers, told (a quantized config alone), written (a preset)
    question   the GPU, how many, how long and how many at once
    paths      the kernel of each group, and the attention's arithmetic
    memory     weights, cache and the rest; tokens and sequences that fit; stages: one GPU of a pipeline
    traffic    bytes and FLOP of one step on one GPU
    steps      lower bounds of a decode step and of a prefill; side_by_side: the same in eight formats
    splits     which ways of spreading the model over GPUs keep it whole
    choice     presets ranked for this model and this GPU
    command    the engine's command line, each flag with its reason
    running    the engine as a child, watched; beside puts what its log says runs beside the plan
    plan       all of these in one answer

Lower bounds are called so; assumptions are printed with the answer that rests on them.
"""
