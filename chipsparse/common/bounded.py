"""Types of numbers in records: a damaged file must not make a chart or a page of a huge one."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

Number = Annotated[float, Field(ge=-1e30, le=1e30)]
Count = Annotated[int, Field(ge=0, le=10**18)]
Seed = Annotated[int, Field(ge=0, le=2**64 - 1)]  # as PyTorch's generator takes it
Index = Annotated[int, Field(ge=0, lt=100_000)]
