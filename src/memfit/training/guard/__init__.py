"""Steps that stay inside the budget, or are run again until they do.

`step_guard` runs a step, `adjusting` chooses a smaller or larger one, `rehearsal` tries the largest
batch before the first step.
"""
