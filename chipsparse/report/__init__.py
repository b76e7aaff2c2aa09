"""The record of a generation, and why it did not do all that was asked.

`records` has the data, which `recorder` and `generation` fill during the transformer calls, and
`summary` tells it. `nothing_sparse` finds the reasons.
"""
