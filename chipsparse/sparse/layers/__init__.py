"""The work of one layer at one step.

`attention` and `mlp` hold the method: what a layer decides, what it computes, and from which cache.
They are handed the `state` of the open call. `column_budget` says which columns a refresh keeps by
their score and which in any case. `tile_order` makes query blocks compact.
"""
