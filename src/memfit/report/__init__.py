"""What people read: terminal, page, notebook and plots.

`terminal` and `plan_terminal` print, `page` and `notebook` are HTML, `story` reads a run's folder
for all of them, `memory_bar` draws the memory bar.
"""
