"""What a run leaves behind, as values and files that later versions can read.

`results` is the result folder and its summary, `run_log` the log of its steps, `evaluation` how
good its predictions are.
"""
