"""What ends a correction of skipped steps in real pipelines, and what is freed by then."""

import copy
import gc

import diffusers
import pytest
import torch

import chipsparse
from chipsparse.sparse.cache.store import CacheStore
from tests.pipelines import small_sparse
from tests.pipelines.changes import at_step
from tests.pipelines.test_families import FAMILIES, arguments_of, as_batch
from tests.pipelines.tiny_runs import STILL
from tests.tiny_models import FLOW, tiny_flux_pipeline, tiny_wan_pipeline

# Of diffusers' older schedulers, which mix tensors and NumPy arrays.
pytestmark = pytest.mark.filterwarnings("ignore:.*__array:DeprecationWarning")

STEPS = 9
# Skipped intervals: steps 2 and 3, step 5, steps 7 and 8.
FULL = [0, 1, 4, 6]
CORRECTED = small_sparse.SPARSE.override(
    {"schedule": {"listed": {"full": FULL}}},
)
HELD = CORRECTED.override({"schedule.correct": False})
EULER = diffusers.FlowMatchEulerDiscreteScheduler
MAKERS = {"flux": tiny_flux_pipeline, "wan 2.1": tiny_wan_pipeline}


def generate(pipe, name, **changes):
    call = arguments_of(name, None)
    return as_batch(small_sparse.generate(pipe, call, num_inference_steps=STEPS, **changes))


def notes(handle):
    return [note for note in handle.report.notes if "not corrected" in note]


def corrected_steps(handle):
    return sorted({record.step for record in handle.report.steps if record.corrected})


def other_levels(pipe, _tensors):
    """The levels of another schedule, from the next step on."""
    scheduler = pipe.scheduler
    scheduler.timesteps = scheduler.timesteps.clone()
    scheduler.sigmas = torch.cat([scheduler.sigmas[:3], 0.9 * scheduler.sigmas[3:]])


def other_scheduler(pipe, _tensors):
    pipe.scheduler = copy.deepcopy(pipe.scheduler)


def a_level_back(pipe, _tensors):
    pipe.scheduler._step_index -= 1


def other_prompt(_pipe, tensors):
    return {"prompt_embeds": -tensors["prompt_embeds"]}


def forgotten_outputs(pipe, _tensors):
    scheduler = pipe.scheduler
    scheduler.model_outputs = [None] * scheduler.config.solver_order
    scheduler.lower_order_nums = 0
    scheduler.last_sample = None


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("flux", other_levels),
        ("flux", other_scheduler),
        ("flux", other_prompt),
        ("wan 2.1", a_level_back),  # it names its steps, whatever the scheduler counts
        ("wan 2.1", forgotten_outputs),
    ],
)
@pytest.mark.parametrize("step", [2, 3])
def test_a_change_within_a_skipped_interval_ends_its_correction(name, change, step):
    """Up to the step after the interval, all is as if nothing were corrected."""
    followed = {}
    corrections = {}
    for config in (CORRECTED, HELD):
        pipe = MAKERS[name]()
        latents = []
        if change is forgotten_outputs:
            pipe.scheduler = diffusers.UniPCMultistepScheduler(**FLOW)

        def after_step(pipe, now, _time, tensors, latents=latents):
            latents.append(tensors["latents"].clone())
            return (change(pipe, tensors) if now == step else None) or {}

        with chipsparse.enable(pipe, config) as handle:
            generate(
                pipe,
                name,
                callback_on_step_end=after_step,
                callback_on_step_end_tensor_inputs=["latents", "prompt_embeds"],
            )
            corrections[config] = corrected_steps(handle)
        followed[config] = latents
    for found, expected in zip(followed[CORRECTED][:5], followed[HELD][:5], strict=True):
        assert torch.equal(found, expected)
    assert corrections[CORRECTED] == [5]
    assert corrections[HELD] == []
    assert not torch.equal(followed[CORRECTED][-1], followed[HELD][-1])


def test_levels_that_are_written_in_place_are_those_of_new_ones():
    """In the middle of a generation, after a step that has read them."""

    def in_place(scheduler):
        scheduler.sigmas[3:].mul_(0.8)

    def anew(scheduler):
        scheduler.sigmas = torch.cat([scheduler.sigmas[:3], 0.8 * scheduler.sigmas[3:]])

    found = []
    for change in (in_place, anew):
        pipe = tiny_flux_pipeline()

        def act(pipe=pipe, change=change):
            change(pipe.scheduler)

        with chipsparse.enable(pipe, CORRECTED) as handle:
            found.append(generate(pipe, "flux", callback_on_step_end=at_step(0, act)))
            assert corrected_steps(handle) == [2, 3, 5]
    assert torch.equal(*found)


@pytest.mark.parametrize("order", ["before enable", "after enable"])
def test_a_step_of_the_users_own_is_called_once_a_step(order):
    """However many steps are gone through again beside it."""
    pipe = tiny_flux_pipeline()
    calls = []
    with chipsparse.enable(pipe, CORRECTED):
        expected = generate(pipe, "flux")

    def replace_step(scheduler):
        own = scheduler.step

        def step(*args, **kwargs):
            calls.append(scheduler.step_index)
            return own(*args, **kwargs)

        scheduler.step = step

    if order == "before enable":
        replace_step(pipe.scheduler)
    with chipsparse.enable(pipe, CORRECTED) as handle:
        if order == "after enable":
            replace_step(pipe.scheduler)
        assert torch.equal(generate(pipe, "flux"), expected)
        assert corrected_steps(handle) == [2, 3, 5]
    assert len(calls) == STEPS


def test_copies_within_a_step_of_the_users_own_are_stock():
    """Such as those that look ahead, whose steps are not the generation's."""
    pipe = tiny_flux_pipeline()
    kinds = []
    with chipsparse.enable(pipe, CORRECTED):
        expected = generate(pipe, "flux")
    own = pipe.scheduler.step

    def step(*args, **kwargs):
        ahead = copy.deepcopy(pipe.scheduler)
        kinds.append(type(ahead))
        vars(ahead).pop("step", None)
        ahead.step(*args, **kwargs)
        return own(*args, **kwargs)

    pipe.scheduler.step = step
    with chipsparse.enable(pipe, CORRECTED) as handle:
        assert torch.equal(generate(pipe, "flux"), expected)
        assert corrected_steps(handle) == [2, 3, 5]
    assert len(kinds) == STEPS
    assert all(kind is EULER for kind in kinds)


def test_schedulers_that_a_call_copies_are_let_go_after_it():
    """LTX-2 copies its scheduler for the sound."""
    pipe = FAMILIES["ltx-2"].make()

    def schedulers():
        gc.collect()
        return sum(issubclass(type(each), EULER) for each in gc.get_objects())

    before = schedulers()
    with chipsparse.enable(pipe, CORRECTED) as handle:
        for _ in range(2):
            generate(pipe, "ltx-2")
            assert corrected_steps(handle) == [2, 3, 5]
            assert schedulers() == before


def live_shapes():
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    return [tuple(tensor.shape) for tensor in tensors]


def test_a_scheduler_that_is_stepped_after_a_generation_is_the_stock_one():
    """Without the model: nothing is kept of the latents, and nothing is corrected."""
    pipe = tiny_flux_pipeline()
    shape = (1, 13, 1009)
    stock = EULER.from_config(pipe.scheduler.config)
    config = CORRECTED.override({"schedule.listed.full": [*FULL, STEPS - 1]})
    with chipsparse.enable(pipe, config) as handle:
        generate(pipe, "flux")
        known = corrected_steps(handle)
        results = []
        for scheduler in (pipe.scheduler, stock):
            scheduler.set_timesteps(4, mu=1.0)
            latents = torch.ones(shape)
            for time in scheduler.timesteps[:3]:
                latents = scheduler.step(latents.sin(), time, latents, return_dict=False)[0]
                assert sum(each[-2:] == shape[-2:] for each in live_shapes()) == 1 + len(results)
            results.append(latents)
        assert corrected_steps(handle) == known
    assert torch.equal(*results)


def test_nothing_of_an_interrupted_correction_is_left_at_decoding(monkeypatch):
    """Interrupted within a skipped interval, for which tensors of the latents' size are kept."""
    pipe = STILL.make()
    counts = []
    decode = pipe.vae.decode

    def interrupt():
        pipe._interrupt = True

    def watched(latents, *args, **kwargs):
        counts.append(sum(shape[-4:] == latents.shape[-4:] for shape in live_shapes()))
        return decode(latents, *args, **kwargs)

    monkeypatch.setattr(pipe.vae, "decode", watched)
    for config in (HELD, CORRECTED):
        with chipsparse.enable(pipe, config) as handle:
            STILL.generate(
                pipe,
                height=32,
                width=80,
                num_inference_steps=STEPS,
                output_type="np",
                callback_on_step_end=at_step(2, interrupt),
            )
            assert [record.step for record in handle.report.steps] == [0, 1, 2]
    held, corrected = counts
    assert corrected == held > 0


def test_unipc_that_clips_what_it_predicts_is_not_corrected_and_says_so():
    found = []
    for config in (CORRECTED, HELD):
        pipe = tiny_wan_pipeline(
            scheduler=diffusers.UniPCMultistepScheduler(**FLOW, thresholding=True),
        )
        with chipsparse.enable(pipe, config) as handle:
            found.append(generate(pipe, "wan 2.1"))
            assert corrected_steps(handle) == []
            said = (
                "skipped steps are not corrected: UniPCMultistepScheduler clips what is predicted"
            )
            assert notes(handle) == ([said] if config is CORRECTED else [])
    assert torch.equal(*found)


def test_the_flow_shift_of_levels_that_rise_is_that_of_their_noise():
    """Mochi's first half of the steps takes off 2.5 % of the noise, which is a large shift."""
    pipe = FAMILIES["mochi"].make()
    with chipsparse.enable(pipe, CORRECTED.override({"schedule.listed.full": [0, 4]})) as handle:
        generate(pipe, "mochi")
    (note,) = notes(handle)
    assert note.endswith("too few of them for a flow shift that is so large")
    assert corrected_steps(handle) == []


def test_memory_is_planned_with_room_for_correction(monkeypatch):
    """Some copies of the latents in fp32, where steps between sparse ones are skipped."""
    planned = []
    admit = CacheStore.admit

    def noting(store, branch, plan, device, demand):
        planned.append(demand.pending_bytes)
        admit(store, branch, plan, device, demand)

    monkeypatch.setattr(CacheStore, "admit", noting)
    pipe = tiny_flux_pipeline()
    for correct in (True, False):
        changes = {"schedule.listed.sparse": [2, 5], "schedule.correct": correct}
        with chipsparse.enable(pipe, CORRECTED.override(changes)):
            latents = generate(pipe, "flux")
    with_room, without = planned
    assert with_room >= without + 3 * latents.float().nbytes
