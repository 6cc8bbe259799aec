"""Triton kernels for the steps of verification that read whole rows of the vocabulary: an optional fast path on CUDA.

Each kernel stands in for one function on tensors, of the same name and contract, which stays the definition and the
path everywhere else: `chain` for functional/chain.py, `coupling` for functional/coupling.py, `draw` for rng.py.
`choose.fused` marks those functions and is the only place that decides; no rule and no loop asks where its tensors lie.

Kernels never draw: uniforms come in as tensors. A row is read in blocks of fixed size, each block's sum is added up in
float64 in the order of the blocks, and nothing depends on the other rows of a batch. Results equal those of the torch
functions up to rounding and not bit by bit, since sums are taken in another order and a GPU contracts a * b - c.

Importing this package imports no Triton: the modules with kernels are loaded at their first use.

`native` is another matter: C code for CPUs, for layers of the lean forward and for softmax.
"""
