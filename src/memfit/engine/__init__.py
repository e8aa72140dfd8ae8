"""One optimizer step, however it is run: knows neither the planner nor the Trainer.

`micro_batches` cuts an effective batch, `executors` runs the parts, `packed_batch` and
`graph_cache` are what they run on, `step_state` lets a failed step run again.
"""
