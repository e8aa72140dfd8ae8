"""`memfit ladder`: the recipe people copy, rung by rung, measured on this machine."""
