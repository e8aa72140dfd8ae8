"""The fastest way of training that fits a budget, priced before anything is trained.

`this_machine` plans for the card at hand, `search` for any; `space` lists the candidates, `pricing`
prices them, `explain` and `advice` say why and what else, `plans` has the result.
"""
