"""Other loops than the enabled pipeline's own call its transformer: which steps they are at."""

import contextlib
import functools
import itertools
import warnings
from types import SimpleNamespace

import diffusers
import pytest
import torch

import chipsparse
from chipsparse.pipelines.denoising_loop import has_next, value_passed_as
from chipsparse.pipelines.patches import stock_class
from tests.pipelines.changes import at_step
from tests.pipelines.model_state import calls_of
from tests.pipelines.small_sparse import SPARSE, STEPS, generate
from tests.pipelines.test_families import FAMILIES, arguments_of, as_batch
from tests.variants import slow, slow_unless

UNKNOWN = (
    "the loop is neither the enabled pipeline's own nor within handle.generation(), so its steps "
    "are not known; enable chipsparse on the pipeline that runs, or run the loop within "
    "handle.generation(scheduler)"
)
NOT_NEXT = (
    "the scheduler of this generation does not have the timestep of this call next, so its step is "
    "not known; give handle.generation() the scheduler that runs the loop"
)
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


def check_said(handle, reason=UNKNOWN, *, nothing=True):
    """The report says once that calls ran dense, and where nothing ran sparse that, too."""
    assert handle.report.fallbacks == [f"calls run dense: {reason}"]
    assert handle.report.nothing_sparse == (f"nothing runs sparse: {reason}" if nothing else None)


@contextlib.contextmanager
def warns_once(start):
    """Checks that the block warns exactly once that something runs dense."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    said = [str(each.message) for each in caught if each.category is chipsparse.DenseWarning]
    assert len(said) == 1
    assert said[0].startswith(start)


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
            before = records(handle)
            ran_sparse = any(each.used_caches for each in handle.report.steps)
            start = "calls run dense: " if ran_sparse else "nothing runs sparse: "
            with warns_once(start + UNKNOWN):
                for _ in range(2):
                    assert torch.equal(call(other, case), stock(case))
            check_said(handle, nothing=not ran_sparse)
            assert records(handle) == before  # the report is of the last generation still
        for _ in range(2):  # the second generation starts anew
            last = handle.report.generation
            with handle.generation(other.scheduler):
                assert torch.equal(call(other, case), expected)
            assert records(handle) == steps
            assert handle.report.generation == last + 1
            assert (handle.report.fallbacks, handle.report.nothing_sparse) == ([], None)
            assert len(counts(handle) - {None}) == 1
            assert all(runner.sparse.session.cache_bytes() == 0 for runner in handle._runners)
        assert torch.equal(call(pipe, case), expected)
        assert records(handle) == steps
        assert handle.report.fallbacks == []
        assert NAMED not in handle.report.notes


@pytest.mark.parametrize("own_scheduler", [True, False])
@pytest.mark.parametrize("case", ["flux unnamed", "cogvideox"])
def test_another_pipeline_with_the_transformer_is_refused_if_strict(case, own_scheduler):
    """Its own loop is unknown, whichever scheduler runs it."""
    pipe = made(case)
    with chipsparse.enable(pipe, SPARSE, strict=True) as handle:
        other = sharing(pipe, own_scheduler=own_scheduler)
        for _ in range(2):
            with pytest.raises(chipsparse.FallbackError) as raised:
                call(other, case)
            assert str(raised.value) == f"calls run dense: {UNKNOWN}"
            assert handle.report.fallbacks == [str(raised.value)]
        assert torch.equal(call(pipe, case), own(case)[0])
        assert handle.report.fallbacks == []
        assert records(handle) == own(case)[1]


@pytest.mark.parametrize("case", ["flux", "cogvideox"])
@pytest.mark.parametrize("config", [SPARSE, SKIPPED], ids=["sparse", "skipped"])
def test_another_pipeline_in_a_callback(case, config):
    """It runs as without chipsparse, and the generation around it goes on."""
    pipe = made(case)
    with chipsparse.enable(pipe, config) as handle:
        expected = call(pipe, case)
        steps = records(handle)
    inner = []
    preview = at_step(3, lambda: inner.append(call(other, case)))
    with chipsparse.enable(pipe, config) as handle:
        other = sharing(pipe)
        with warns_once(f"calls run dense: {UNKNOWN}"):
            for _ in range(2):
                assert torch.equal(call(pipe, case, callback_on_step_end=preview), expected)
                assert records(handle) == steps
                check_said(handle, nothing=False)
    assert len(inner) == 2
    assert all(torch.equal(each, stock(case)) for each in inner)
    dense = chipsparse.SparsityConfig.dense()
    with chipsparse.enable(pipe, dense, strict=True) as handle:  # nothing sparse is asked for
        call(pipe, case, callback_on_step_end=preview)
    assert torch.equal(inner[2], stock(case))
    assert handle.report.fallbacks == []


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
        enabled = chipsparse.enable(pipe, SPARSE, strict=True)
        with enabled as handle, torch.no_grad(), handle.generation():
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


@pytest.mark.parametrize("within", ["nothing", "a generation"])
@pytest.mark.parametrize("sparse", [True, False])
def test_a_loop_by_no_scheduler(sparse, within):
    """The pipeline's has the thousand timesteps of its training."""
    pipe = made("flux")
    given = first_call("flux")
    config = SPARSE if sparse else chipsparse.SparsityConfig.dense()
    reason = UNKNOWN if within == "nothing" else NOT_NEXT
    warned = warns_once(f"nothing runs sparse: {reason}") if sparse else contextlib.nullcontext()
    with chipsparse.enable(pipe, config, strict=not sparse) as handle, torch.no_grad(), warned:
        loop = contextlib.nullcontext() if within == "nothing" else handle.generation()
        with loop:
            for value in (1.0, 0.75, 0.5, 0.25):
                pipe.transformer(**at(given, torch.tensor([value])))
        assert records(handle) == []
        if sparse:
            check_said(handle, reason)
        else:
            assert handle.report.fallbacks == []


def test_several_processes_that_share_tokens_refuse_a_loop_that_is_not_known(monkeypatch):
    """Each would have but its share of them."""
    pipe = made("flux")
    given = first_call("flux")
    team = SimpleNamespace(failed=lambda *_: None, close=lambda: None, stuck=False)
    with chipsparse.enable(pipe, SPARSE) as handle, torch.no_grad():
        (runner,) = handle._runners
        with monkeypatch.context() as patch:
            patch.setattr(runner, "team", team)
            patch.setattr(runner.sparse, "_team", team)
            patch.setattr(runner.sparse, "split", object())
            with pytest.raises(ValueError, match="several processes: the loop is neither the"):
                pipe.transformer(**given)
        assert torch.equal(call(pipe, "flux"), own("flux")[0])


def test_compiled_blocks_run_in_a_loop_that_is_not_known():
    pipe = made("flux")
    given = first_call("flux")
    sigma = torch.ones(1)
    pipe.transformer.compile_repeated_blocks(backend="eager", fullgraph=True)
    with torch.no_grad():
        expected = pipe.transformer(**at(given, sigma))[0]
        with chipsparse.enable(pipe, SPARSE):
            call(pipe, "flux")
            with pytest.warns(chipsparse.DenseWarning, match="handle.generation"):
                assert torch.equal(pipe.transformer(**at(given, sigma))[0], expected)


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
            assert handle._runners[0].branches() == branches


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
    ("timesteps", "told", "timestep", "is_next"),
    [
        # A step that is told has to be that of the timestep.
        (FEW, 1, 600.0, True),
        (FEW, 1, 300.0, False),
        (FEW, 1, 1000.0, False),
        (FEW, 3, 300.0, False),  # it is done
        # Where none is told, any timestep of the schedule may be next.
        (FEW, None, 1000.0, True),
        ([999, 749, 499, 249], "never", 499, True),
        ([999, 749, 499, 249], "never", 624, False),
        (CLOSE, 2, 998.0, True),
        (CLOSE, 3, 998.0, False),
    ],
)
def test_the_step_that_a_scheduler_has_next(timesteps, told, timestep, is_next):
    scheduler = SimpleNamespace(timesteps=torch.tensor(timesteps))
    if told != "never":
        scheduler.step_index = told
        scheduler.begin_index = 0
    for dtype in (torch.float32, torch.bfloat16):
        called = torch.tensor([timestep]).to(dtype)

        def read(schedule, called=called):
            value = value_passed_as(called, schedule)
            return float(called) if value is None else value

        assert has_next(scheduler, read) == is_next


def test_the_timesteps_of_a_generation_that_is_over_run_no_other_loop():
    pipe = made("cogvideox")
    given = first_call("cogvideox")

    def loop():
        for time in pipe.scheduler.timesteps:
            pipe.transformer(**at(given, time))

    with chipsparse.enable(pipe, SPARSE) as handle, torch.no_grad():
        assert torch.equal(call(pipe, "cogvideox"), own("cogvideox")[0])
        with warns_once(f"calls run dense: {UNKNOWN}"):
            loop()
        check_said(handle, nothing=False)


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
        with warns_once(f"nothing runs sparse: {NOT_NEXT}"):
            for time in times:  # they count no more, though the scheduler has the second one next
                pipe.transformer(**at(given, time / 1000))
        check_said(handle, NOT_NEXT)
        assert records(handle) == [(0, "call0", "dense")]


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
        assert handle.report.cache_bytes == 0
        call(pipe, "flux")
        assert handle.report.cache_bytes > 0
