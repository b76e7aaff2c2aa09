"""The work of one layer at one step.

`attention` and `mlp` hold the method: what a layer decides, what it computes, and from which cache.
They get the `state` of the open call. `column_budget` says how many columns a refresh keeps, and
`column_source` where it gets them. `token_permutation` makes query blocks compact.
"""
