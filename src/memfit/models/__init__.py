"""Models and tokenizers: loaded, looked into, downloaded and uploaded.

`loading` makes a classifier ready to train, `layers` and `layer_stack` know its parts, `hubs` is
the one door to the Hugging Face Hub and ModelScope.
"""
