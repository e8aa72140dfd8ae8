"""A BERT layer's small operators, each fused with its neighbours, with their gradients.

`fused_layers` is the strategy; `layer_functions` are the operators, computed by one of three sets
of kernels.
"""
