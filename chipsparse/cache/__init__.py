"""What layers keep between steps, and where.

`tensors` are kept, of the `kinds` that a config needs. `memory_plan` decides before the first step
what fits, `placement` where each layer's caches live. `store` holds them; those in host memory
pass through `offload`.
"""
