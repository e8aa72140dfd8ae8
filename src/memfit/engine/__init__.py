"""One optimizer step, however it is run: knows neither the planner nor the Trainer.

`micro_batches` cuts an effective batch, `executors` runs the parts, `packed_batch` and
`graph_cache` are what they run on, `layer_boundaries` and `step_state` let a failed step run again.
"""
