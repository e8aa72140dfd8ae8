"""BudgetTrainer: transformers' Trainer on effective batches, inside a memory budget.

`trainer` is the class; `guard` keeps steps inside the budget, `checkpoints` and `saving` what is
written, `health` the numbers, `progress` what is shown.
"""
