"""What a candidate takes: memfit's own step, traced on fake tensors.

`pricer` composes prices from `shallow_traces` in microseconds; `step_trace` traces a candidate in
full.
"""
