"""Other loops than the enabled pipeline's own call its transformer: which steps they are at."""

import contextlib
import functools
import itertools
from types import SimpleNamespace

import diffusers
import pytest
import torch

import chipsparse
from chipsparse.pipelines.denoising_loop import has_next, value_passed_as
from chipsparse.pipelines.patches import stock_class
from tests.pipelines.changes import at_step
from tests.pipelines.model_state import calls_of
from tests.pipelines.small_sparse import EXACT, SPARSE, STEPS, assert_close, generate
from tests.pipelines.test_families import FAMILIES, arguments_of, as_batch
from tests.variants import slow, slow_unless

NOT_PLACED = "scheduler of the enabled pipeline does not run this call, so its step is not known"
SAY_IT = "enable chipsparse on the pipeline that runs, or run the loop within handle.generation"
NAMED = (
    "the scheduler of the enabled pipeline does not run this call, so forecasts go by steps; "
    "enable chipsparse on the pipeline that runs"
)
CASES = {
    "flux": ("flux", None),
    "flux guided": ("flux", "guided"),
    "flux unnamed": ("flux image to image", "guided"),  # its pipeline names no branches
    "hunyuan video": ("hunyuan video", "guided"),
    "cogvideox": ("cogvideox 2b", "batch"),  # its scheduler never tells its step
    "cogvideox image to video": ("cogvideox 5b image to video", None),
    "z-image": ("z-image", "guided, other lengths"),  # timesteps rise, as the next one's
    "mochi": ("mochi", "batch"),
    "wan": ("wan 2.1", None),  # names its steps
    "wan image to video": ("wan 2.1 image to video", None),  # does not
    "wan two experts": ("wan 2.2 two experts", None),
}
BEFORE = ("nothing", "a call", "a call of as many steps", "a call that broke off")
SKIPPED = SPARSE.override(
    {"schedule.listed.full": [0, 1, 4]},
)


def call(pipe, case, **changes):
    given = arguments_of(*CASES[case])
    given = {**given, "strength": 1.0} if "strength" in given else given  # all steps
    return as_batch(generate(pipe, given, **changes))


def made(case):
    return FAMILIES[CASES[case][0]].make()


def sharing(pipe, *, own_scheduler=True):
    other = stock_class(pipe).from_pipe(pipe, transformer=pipe.transformer)
    other.set_progress_bar_config(disable=True)
    assert other.transformer is pipe.transformer
    assert other.scheduler is pipe.scheduler
    if own_scheduler:
        other.scheduler = type(other.scheduler).from_config(other.scheduler.config)
    return other


def run_before(pipe, case, before):
    def end(_pipe, now, _time, tensors):
        if now == 2:
            raise InterruptedError
        return tensors

    if before == "a call that broke off":
        with pytest.raises(InterruptedError):
            call(pipe, case, callback_on_step_end=end)
    elif before != "nothing":
        call(pipe, case, num_inference_steps=STEPS if "many" in before else STEPS - 2)


def records(handle):
    return [(each.step, each.branch, each.action.value) for each in handle.report.steps]


def counts(handle):
    return {each.steps_total for each in handle.report.steps}


def corrections(handle):
    steps = [each.step for each in handle.report.steps if each.corrected]
    return [note for note in handle.report.notes if "corrected" in note], steps


@functools.cache
def own(case):
    pipe = made(case)
    with chipsparse.enable(pipe, SPARSE) as handle:
        return call(pipe, case), records(handle)


@functools.cache
def stock(case):
    return call(made(case), case)


def runs_dense(handle):
    """True if all calls ran dense, and the report and a warning say so and what would help."""
    (fallback,) = handle.report.fallbacks
    sentences = fallback, handle.report.nothing_sparse
    assert all(NOT_PLACED in each and SAY_IT in each for each in sentences)
    return set(handle.report.actions()) == {"dense"}


QUICK = {
    ("flux", "a call of as many steps"),
    ("flux unnamed", "nothing"),
    ("cogvideox", "nothing"),
    ("hunyuan video", "a call that broke off"),
    ("z-image", "nothing"),
    ("wan", "a call of as many steps"),
}


@pytest.mark.parametrize(
    ("case", "before"),
    [pair if pair in QUICK else slow(*pair) for pair in itertools.product(CASES, BEFORE)],
)
def test_a_pipeline_with_a_scheduler_of_its_own(case, before):
    pipe = made(case)
    expected, steps = own(case)
    assert {"dense", "refresh", "sparse"} <= {action for *_, action in steps}
    with chipsparse.enable(pipe, SPARSE) as handle:
        other = sharing(pipe)
        run_before(pipe, case, before)
        if case in ("wan", "wan two experts"):  # which name their steps
            assert torch.equal(call(other, case), expected)
            assert records(handle) == steps
            assert NAMED in handle.report.notes
        else:
            with pytest.warns(chipsparse.DenseWarning, match="handle.generation"):
                assert_close(call(other, case), stock(case))
            assert runs_dense(handle)
        for _ in range(2):  # the second generation starts anew
            last = handle.report.generation
            with handle.generation(other.scheduler):
                assert torch.equal(call(other, case), expected)
            assert records(handle) == steps
            assert handle.report.generation == last + 1
            assert (handle.report.fallbacks, handle.report.nothing_sparse) == ([], None)
            assert len(counts(handle) - {None}) == 1
            assert all(adapter.session.cache_bytes() == 0 for adapter in handle._adapters)
        assert torch.equal(call(pipe, case), expected)
        assert records(handle) == steps
        assert handle.report.fallbacks == []
        assert NAMED not in handle.report.notes


@pytest.mark.parametrize(
    ("case", "before"),
    [("flux unnamed", "a call that broke off"), ("cogvideox", "nothing")],
)
def test_a_pipeline_that_shares_the_scheduler_runs_as_the_enabled_one(case, before):
    pipe = made(case)
    expected, steps = own(case)
    with chipsparse.enable(pipe, SPARSE, strict=True) as handle:
        other = sharing(pipe, own_scheduler=False)
        run_before(pipe, case, before)
        for _ in range(2):
            assert torch.equal(call(other, case), expected)
            assert records(handle) == steps
            assert len(counts(handle) - {None}) == 1
            assert handle.report.fallbacks == []
        assert torch.equal(call(pipe, case), expected)


@pytest.mark.parametrize("case", ["flux", "cogvideox"])
def test_another_pipeline_in_a_callback(case):
    pipe = made(case)
    inner = []
    preview = at_step(2, lambda: inner.append(call(other, case)))
    with chipsparse.enable(pipe, SPARSE):
        other = sharing(pipe)
        call(pipe, case, callback_on_step_end=preview)
        is_placed = case == "cogvideox"  # by its timesteps: its scheduler never tells its step
        assert_close(inner[0], own(case)[0] if is_placed else stock(case))
    with chipsparse.enable(pipe, EXACT) as handle:
        assert_close(call(pipe, case, callback_on_step_end=preview), stock(case))
        assert_close(inner[1], stock(case))
    assert handle.report.fallbacks == []
    assert [each.step for each in handle.report.steps] == list(range(3, STEPS))


@functools.cache
def first_call(case):
    pipe = made(case)
    return {**calls_of(pipe.transformer, lambda: call(pipe, case))[0], "return_dict": False}


def at(given, timestep, **changes):
    return {**given, "timestep": timestep.expand(len(given["timestep"])), **changes}


ROUNDED = {
    "divided, rounded": lambda time, _: (time / 1000).bfloat16(),
    "filled": lambda time, _: torch.full((1,), float(time) / 1000, dtype=torch.bfloat16)[0],
    "sigma": lambda _, sigma: sigma.bfloat16(),
    "the pipeline's": lambda time, _: time.bfloat16() / 1000,
}


@pytest.mark.parametrize("shift", [1.0, 12.0])
@pytest.mark.parametrize("rounded", slow_unless(("divided, rounded", "filled"), ROUNDED))
def test_a_loop_of_the_users_that_rounds_its_timesteps(rounded, shift):
    pipe = made("flux")
    given = first_call("flux")
    pipe.scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=shift)
    for steps in (True, False):
        with chipsparse.enable(pipe, SPARSE, strict=True) as handle, torch.no_grad():
            pipe.scheduler.set_timesteps(20)
            for time, sigma in zip(pipe.scheduler.timesteps, pipe.scheduler.sigmas, strict=False):
                pipe.transformer(**at(given, ROUNDED[rounded](time, sigma)))
                if steps:
                    latents = given["hidden_states"]
                    pipe.scheduler.step(latents, time, latents)
            assert handle.report.generation == 1
            assert {each.step for each in handle.report.steps} <= set(range(20))
            assert len(handle.report.steps) == 20
            assert counts(handle) == {20}


@pytest.mark.parametrize("sparse", [True, False])
def test_a_loop_by_no_scheduler(sparse):
    """The pipeline's has the thousand timesteps of its training; missed where any is sparse."""
    pipe = made("flux")
    given = first_call("flux")
    config = SPARSE if sparse else chipsparse.SparsityConfig.dense()
    warned = pytest.warns(chipsparse.DenseWarning) if sparse else contextlib.nullcontext()
    with chipsparse.enable(pipe, config, strict=not sparse) as handle, torch.no_grad(), warned:
        for value in (1.0, 0.75, 0.5, 0.25):
            pipe.transformer(**at(given, torch.tensor([value])))
        assert [each.step for each in handle.report.steps] == [0, 1, 2, 3]
        assert runs_dense(handle) if sparse else handle.report.fallbacks == []


@pytest.mark.parametrize("guided", [False, True])
def test_parts_without_a_pipeline_say_themselves_whether_a_loop_is_guided(guided):
    """A pipeline that is another loop's matter tells only of its own last call."""
    pipe = made("wan")
    call(pipe, "wan", num_inference_steps=1)
    assert pipe.do_classifier_free_guidance
    parts = SimpleNamespace(
        components=pipe.components,
        scheduler=pipe.scheduler,
        do_classifier_free_guidance=guided,
    )
    for loop_of, branches in ((parts, 1 + guided), (pipe, 1)):
        with chipsparse.enable(loop_of, SPARSE) as handle:
            assert handle._adapters[0].branches() == branches


def own_loop(pipe, scheduler=None, *, broken=None, steps=True):
    """The latents of a loop by Euler's method, stepping the scheduler or not."""
    scheduler = scheduler or pipe.scheduler
    given = first_call("flux")
    scheduler.set_timesteps(STEPS, mu=1.0, device="cpu")
    latents = given["hidden_states"]
    sigmas = scheduler.sigmas
    for step, time in enumerate(scheduler.timesteps):
        if step == broken:
            raise InterruptedError
        output = pipe.transformer(**at(given, time / 1000, hidden_states=latents))[0]
        if steps:
            latents = scheduler.step(output, time, latents, return_dict=False)[0]
        else:
            latents = latents + (sigmas[step + 1] - sigmas[step]) * output
    return latents


@pytest.mark.parametrize("whose", ["the pipeline's", "another"])
def test_a_loop_that_is_a_generation_is_corrected_as_the_pipelines(whose):
    pipe = made("flux")
    found = {}
    other = diffusers.FlowMatchEulerDiscreteScheduler.from_config(pipe.scheduler.config)
    scheduler = None if whose == "the pipeline's" else other
    for correct in (True, False):
        config = SKIPPED.override({"schedule.correct": correct})
        with chipsparse.enable(pipe, config) as handle, torch.no_grad():
            with pytest.raises(InterruptedError), handle.generation(scheduler):
                own_loop(pipe, scheduler, broken=3)
            assert type(other) is diffusers.FlowMatchEulerDiscreteScheduler
            with handle.generation(scheduler):
                found[correct] = own_loop(pipe, scheduler)
            assert [each.action.value for each in handle.report.steps] == (
                ["dense", "dense", "skip", "skip", "dense"] + ["skip"] * (STEPS - 5)
            )
            assert corrections(handle) == ([], [2, 3] if correct else [])
            assert handle.report.fallbacks == []
            with handle.generation(scheduler):
                assert torch.equal(own_loop(pipe, scheduler), found[correct])
    assert not torch.equal(found[True], found[False])
    with pytest.raises(RuntimeError, match="used up"), handle.generation():
        pass


def test_a_generation_within_another_is_refused_and_one_may_end_its_handle():
    pipe = made("flux")
    kind = type(pipe.scheduler)

    def enter(*_):
        with pytest.raises(RuntimeError, match="another one would end it"), handle.generation():
            pass
        return {}

    handle = chipsparse.enable(pipe, SPARSE)
    assert torch.equal(call(pipe, "flux", callback_on_step_end=enter), own("flux")[0])
    with handle.generation():
        enter()
        handle.disable()
    assert type(pipe.scheduler) is kind


def test_a_loop_that_does_not_step_the_scheduler_is_not_corrected_and_says_so():
    pipe = made("flux")
    found = []
    said = "skipped steps are not corrected: the loop does not step its scheduler as pipelines do"
    for correct in (True, False):
        config = SKIPPED.override({"schedule.correct": correct})
        with chipsparse.enable(pipe, config) as handle, torch.no_grad(), handle.generation():
            found.append(own_loop(pipe, steps=False))
        assert corrections(handle)[0] == ([said] if correct else [])
    assert torch.equal(*found)


FEW = [1000.0, 600.0, 300.0]
# Rounded to half precision, many steps with a large shift have equal values.
CLOSE = [1000.0, 999.0, 998.0, 500.0]


@pytest.mark.parametrize(
    ("timesteps", "told", "timestep", "behind_step", "is_next"),
    [
        # A step that is told has to be that of the timestep.
        (FEW, 1, 600.0, False, True),
        (FEW, 1, 300.0, False, False),
        (FEW, 3, 300.0, False, False),  # it is done
        # Behind a step it may be that one.
        (FEW, 1, 1000.0, False, False),
        (FEW, 1, 1000.0, True, True),
        (FEW, 1, 300.0, True, False),
        # Where none is told, any timestep of the schedule may be next.
        (FEW, None, 1000.0, False, True),
        ([999, 749, 499, 249], "never", 499, False, True),
        ([999, 749, 499, 249], "never", 624, False, False),
        (CLOSE, 2, 998.0, False, True),
        (CLOSE, 3, 998.0, False, False),
    ],
)
def test_the_step_that_a_scheduler_has_next(timesteps, told, timestep, behind_step, is_next):
    scheduler = SimpleNamespace(timesteps=torch.tensor(timesteps))
    if told != "never":
        scheduler.step_index = told
        scheduler.begin_index = 0
    for dtype in (torch.float32, torch.bfloat16):
        called = torch.tensor([timestep]).to(dtype)

        def read(schedule, called=called):
            value = value_passed_as(called, schedule)
            return float(called) if value is None else value

        assert has_next(scheduler, read, behind_step=behind_step) == is_next


def test_the_timesteps_of_a_generation_that_is_over_run_no_other_loop():
    """A scheduler that never tells its step has them still."""
    pipe = made("cogvideox")
    given = first_call("cogvideox")

    def loop():
        for time in pipe.scheduler.timesteps:
            pipe.transformer(**at(given, time))

    with chipsparse.enable(pipe, SPARSE) as handle, torch.no_grad():
        assert torch.equal(call(pipe, "cogvideox"), own("cogvideox")[0])
        with pytest.warns(chipsparse.DenseWarning, match="handle.generation"):
            loop()
        assert runs_dense(handle)


@pytest.mark.parametrize("case", ["flux", "flux guided"])
def test_a_callback_may_call_the_transformer_at_the_step_just_done(case):
    """Its scheduler is at the next step already."""
    pipe = made(case)
    given = first_call(case)
    looked = []

    def look():
        times = pipe.scheduler.timesteps
        step = pipe.scheduler.step_index
        pipe.transformer(**at(given, times[step - 1] / 1000))
        looked.append(list(handle.report.fallbacks))

    with chipsparse.enable(pipe, EXACT, strict=True) as handle:
        assert_close(call(pipe, case, callback_on_step_end=at_step(2, look)), stock(case))
    assert looked == [[]]


def test_a_loop_is_at_the_next_step_of_its_scheduler_and_not_at_the_one_just_done():
    """A step done again has latents that the scheduler knows nothing of."""
    pipe = made("flux")
    given = first_call("flux")
    with chipsparse.enable(pipe, SPARSE) as handle, torch.no_grad(), handle.generation():
        pipe.scheduler.set_timesteps(STEPS, mu=1.0)
        latents = given["hidden_states"]
        times = pipe.scheduler.timesteps
        output = pipe.transformer(**at(given, times[0] / 1000))[0]
        assert handle.report.fallbacks == []
        pipe.scheduler.step(output, times[0], latents)
        with pytest.warns(chipsparse.DenseWarning, match="handle.generation"):
            pipe.transformer(**at(given, times[0] / 1000))
        assert runs_dense(handle)


def test_a_loop_whose_scheduler_is_not_known_is_not_said_to_be_corrected():
    """Its steps are known by their names alone."""
    pipe = made("wan")
    with chipsparse.enable(pipe, SKIPPED) as handle:
        for runs, is_corrected in ((pipe, True), (sharing(pipe), False)):
            call(runs, "wan")
            assert handle.report.actions()["skip"] > 0
            (planned,) = handle.report.to_dict()["transformers"].values()
            assert ("then corrected" in planned["schedule"]) == is_corrected
            assert bool(corrections(handle)[1]) == is_corrected


def test_a_loop_whose_steps_are_not_known_keeps_no_caches():
    pipe = made("flux")
    with chipsparse.enable(pipe, SPARSE) as handle:
        with pytest.warns(chipsparse.DenseWarning):
            call(sharing(pipe), "flux")
        assert runs_dense(handle)
        assert handle.report.cache_bytes == 0
        call(pipe, "flux")
        assert handle.report.cache_bytes > 0
