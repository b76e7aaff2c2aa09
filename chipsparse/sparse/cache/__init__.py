"""The tensors that layers keep between steps, and their homes.

`tensors` is the table of them: sizes, dtypes, and who writes them. `memory_plan` decides before
the first step what fits, `placement` where each layer's caches live. `store` owns them: tensors on
the device, and hosted ones, which pass through the slots of `offload`.
"""
