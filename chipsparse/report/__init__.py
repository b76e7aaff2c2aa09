"""The record of a generation, and why it did not do all that was asked.

`recorder` writes it down during a transformer call, `generation` holds it, and `summary` tells it.
`nothing_sparse` finds the reasons.
"""
