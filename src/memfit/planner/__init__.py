"""What a training needs before it runs, and the fastest recipe that fits its budget.

    task.py      what is asked
    recipes.py   the table of recipes, with the reason of each row
    price.py     one recipe at one setting: a trace -> bytes by phase, seconds, host bytes
    search.py    per recipe: a few traces, a line, a trace to confirm; the fastest that fits
    advice.py    the same search, asked again with more allowed
    explain.py   the reasons, from prices with and without
    plan.py      the plan and its file

`plan_for` in search.py is the door to every plan; cache.py keeps them for the next run.
"""
