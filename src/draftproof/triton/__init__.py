"""Triton kernels for the steps of verification that read whole rows of the vocabulary: an optional fast path on CUDA.

Each kernel replaces one torch function of the same name and contract: `chain` those of functional/chain.py, `coupling`
those of functional/coupling.py, `draw` that of rng.py. The torch function is the definition, and it runs everywhere
else. `choose.fused` marks these functions and is the only place that decides between the two.

Kernels draw no random numbers: uniforms are passed in as tensors. A row is read in blocks of fixed size, the sums of
the blocks are added in float64 in their order, and no row depends on the other rows of a batch. Results agree with
torch up to rounding, not bit for bit: sums are taken in another order, and a GPU computes a * b - c in one step.

Importing this package does not import Triton: the modules with kernels are loaded at their first use.

`native` is separate: C code for CPUs, for layers of the lean forward pass and for softmax.
"""
