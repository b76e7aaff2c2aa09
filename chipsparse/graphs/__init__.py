"""Sparse steps as CUDA graphs: captured once, then replayed.

`sparse_calls` decides which calls, `step_graph` holds what was captured, `cuda_capture` captures,
and `model_state` sees when a graph is stale.
"""
