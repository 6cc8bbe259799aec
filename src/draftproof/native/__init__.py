"""The C library: its build, the choice of a level for this processor, and its functions on tensors."""
