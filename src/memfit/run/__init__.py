"""One run: prepared, planned, trained, evaluated, saved, published, used.

`prepare` comes before any weights, `workflow` goes from the table to the result folder, `inference`
uses what was trained, `publish` uploads it.
"""
