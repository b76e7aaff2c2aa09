"""The way from a call of the transformer to the kernel of a sparse step is short."""

import sys

import chipsparse
from chipsparse.kernels.column_sparse_attention import reference
from tests.pipelines.tiny_runs import WAN

MOST_ABOVE = 4  # frames of ours between the pipeline and diffusers' dispatcher
# With the reference's function, where a GPU has that of its kernel and behind it `launch`.
MOST_BELOW = 5


def test_few_of_our_frames_stand_around_the_dispatcher_at_a_sparse_step():
    pipe, seen = WAN.make(), []

    def watch(frame, event, _):
        if event != "call" or frame.f_code is not reference.column_sparse_attention.__code__:
            return
        names = []
        while frame is not None:
            module, name = frame.f_globals.get("__name__", ""), frame.f_code.co_name
            if module.startswith("chipsparse.") or name == "dispatch_attention_fn":
                names.append(f"{module.rpartition('.')[2]}.{name}")
            frame = frame.f_back
        if "attention._refresh" not in names:
            seen.append(names[::-1])

    with chipsparse.enable(pipe, WAN.SPARSE):
        sys.setprofile(watch)
        try:
            WAN.generate(pipe, num_inference_steps=3)
        finally:
            sys.setprofile(None)
    assert len(seen) == 2 * len(pipe.transformer.blocks)  # one sparse step, two branches
    for names in seen:
        dispatcher = names.index("attention_dispatch.dispatch_attention_fn")
        above = names[names.index("adapter.__call__") : dispatcher]
        below = names[dispatcher + 1 :]
        assert above[1:3] == ["adapter.call", "step_graph.run"], names
        assert below[2:4] == ["attention.__call__", "attention.sparse_step"], names
        assert len(above) <= MOST_ABOVE, names
        assert len(below) <= MOST_BELOW, names
