"""The way from diffusers' dispatcher to the kernel of a sparse step is short."""

import sys

import chipsparse
from chipsparse.kernels.column_sparse_attention import reference
from tests.pipelines.tiny_runs import WAN

# With the reference's function, where a GPU has that of its kernel and behind it `launch`.
MOST_FRAMES = 5


def test_few_of_our_frames_stand_between_the_dispatcher_and_the_kernel_of_a_sparse_step():
    pipe, seen = WAN.make(), []

    def watch(frame, event, _):
        if event != "call" or frame.f_code is not reference.column_sparse_attention.__code__:
            return
        names = []
        while frame is not None and frame.f_code.co_name != "dispatch_attention_fn":
            module = frame.f_globals.get("__name__", "")
            if module.startswith("chipsparse."):
                names.append(f"{module.rpartition('.')[2]}.{frame.f_code.co_name}")
            frame = frame.f_back
        if frame is not None and "attention._refresh" not in names:
            seen.append(names[::-1])

    with chipsparse.enable(pipe, WAN.SPARSE):
        sys.setprofile(watch)
        try:
            WAN.generate(pipe, num_inference_steps=3)
        finally:
            sys.setprofile(None)
    assert len(seen) == 2 * len(pipe.transformer.blocks)  # one sparse step, two branches
    for names in seen:
        assert names[2:4] == ["attention.__call__", "attention.sparse_step"], names
        assert len(names) <= MOST_FRAMES, names
