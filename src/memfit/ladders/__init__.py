"""`memfit ladder`: the recipe people copy, rung by rung, measured on this machine.

`rungs` is the list to add a rung to, `climb` runs each in a process of its own (`run_rung`), `show`
prints and draws them.
"""
