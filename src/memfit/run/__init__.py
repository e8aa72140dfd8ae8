"""One run: prepared, planned, trained, evaluated, saved, published, used.

`train` goes from the table to the result folder, `resume` goes on with a run that was stopped,
`inference` uses what was trained, `publish` uploads it.
"""
