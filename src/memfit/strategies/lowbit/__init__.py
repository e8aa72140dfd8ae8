"""AdamW in five bytes a parameter, and the sinks that gradients can take to it.

Three strategies (`lowbit_adamw`, `gradient_release`, `state_offload`), the optimizer, its number
formats and kernels, and the gradient sinks.
"""
