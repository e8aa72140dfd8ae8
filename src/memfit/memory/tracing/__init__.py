"""Runs a step on fake tensors and follows every storage from birth to death.

`tracker` records, `fake_tensors` runs, `operators` and `attention_kernels` know what CUDA does
differently, `depth` makes a deep model's trace from two shallow ones.
"""
