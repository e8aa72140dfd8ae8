"""Padding-free batches for stock transformers classifiers.

`packing_strategy` is the strategy; `packed_model` changes a model, `packed_attention` keeps each
text to itself.
"""
