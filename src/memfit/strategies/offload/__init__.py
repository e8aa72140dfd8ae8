"""Activations, optimizer state and weights that wait in host memory.

Two strategies (`activation_offload`, `optimizer_offload`), and `host_memory`: pinned memory with
the copies beside the computation.
"""
