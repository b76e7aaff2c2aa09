"""Gluon under one set of names: its interface moves between Triton releases (3.6 to 3.9 so far).

Kernels import what moved from here and the rest from Triton itself.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, tma

# A copy of addressed elements to shared memory, and of a described tile: renamed in 3.8.
async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
mbarrier_arrive_on_copies = async_copy.mbarrier_arrive

# The barrier among the warps of one partition: renamed in 3.7.
partition_barrier = getattr(gl, "barrier", None) or gl.thread_barrier

__all__ = [
    "async_load",
    "gl",
    "gluon",
    "mbarrier_arrive_on_copies",
    "partition_barrier",
    "tma_load",
]
