"""Sparse steps as CUDA graphs: captured once, then replayed.

`step_graph` decides which calls and holds what was captured, `cuda_capture` captures, and
`model_state` sees when a graph is stale.
"""
