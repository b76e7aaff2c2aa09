"""The way from diffusers' dispatcher to the kernel of a sparse step is short."""

import sys

import chipsparse
from chipsparse.kernels.column_sparse_attention import reference
from tests.pipelines.test_wan import SPARSE, generate
from tests.tiny_models import tiny_wan_pipeline

# With the reference's function, where a GPU has that of its kernel and behind it `launch`.
MOST_FRAMES = 5


def frames_between(dispatcher, kernel, run):
    """Our functions on the stack, the dispatcher's first, whenever a kernel is called in a run."""
    found = []

    def watch(frame, event, _):
        if event != "call" or frame.f_code is not kernel.__code__:
            return
        names = []
        while frame is not None and frame.f_code.co_name != dispatcher:
            module = frame.f_globals.get("__name__", "")
            if module.startswith("chipsparse."):
                names.append(f"{module.rpartition('.')[2]}.{frame.f_code.co_name}")
            frame = frame.f_back
        found.append(names[::-1] if frame is not None else [])

    sys.setprofile(watch)
    try:
        run()
    finally:
        sys.setprofile(None)
    return [names for names in found if names]


def test_few_of_our_frames_stand_between_the_dispatcher_and_the_kernel_of_a_sparse_step():
    pipe = tiny_wan_pipeline()
    with chipsparse.enable(pipe, SPARSE):
        seen = frames_between(
            "dispatch_attention_fn",
            reference.column_sparse_attention,
            lambda: generate(pipe, num_inference_steps=3),
        )
    sparse = [names for names in seen if "attention._refresh" not in names]
    assert len(sparse) == 2 * len(pipe.transformer.blocks)  # one sparse step, two branches
    for names in sparse:
        assert names[2:4] == ["attention.__call__", "attention.sparse_step"], names
        assert len(names) <= MOST_FRAMES, names
