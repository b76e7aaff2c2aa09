"""What one layer does at one step.

`attention` and `mlp` hold the method. `token_order` makes query groups compact, `static_columns`
are always kept, and `kept_columns` reads what was. `error_guard` watches the error of sparse
attention, `missed_refreshes` knows the layers whose caches are too old.
"""
