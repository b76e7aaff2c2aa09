"""What one layer does at one step.

`attention` and `mlp` hold the method. `token_order` makes query groups compact, `static_columns`
are always kept, and `kept_columns` reads what was. `missed_refreshes` knows the layers whose caches
are too old.
"""
