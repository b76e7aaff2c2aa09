"""Other loops than the enabled pipeline's own call its transformer: which steps they are at."""

import contextlib
import functools
from types import SimpleNamespace

import diffusers
import diffusers.callbacks
import pytest
import torch

import chipsparse
from chipsparse.pipelines.denoising_loop import place_of_call, was_set
from chipsparse.pipelines.patches import stock_class
from chipsparse.pipelines.timesteps import value_passed_as
from tests.pipelines.small_sparse import EXACT, SPARSE, STEPS, assert_close, generate
from tests.pipelines.test_families import FAMILIES, arguments_of, as_batch
from tests.variants import slow_unless

NOT_PLACED = (
    "the scheduler of the enabled pipeline does not run this call, so its step is not known"
)
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
QUICK = ("flux", "flux unnamed", "cogvideox", "hunyuan video", "z-image", "wan")
BEFORE = ("nothing", "a call", "a call of as many steps", "a call that broke off")


def arguments(case):
    given = arguments_of(*CASES[case])
    return {**given, "strength": 1.0} if "strength" in given else given  # all steps


def call(pipe, case, **changes):
    return as_batch(generate(pipe, arguments(case), **changes))


def sharing(pipe, *, own_scheduler=True):
    """A stock pipeline with the transformer of another one."""
    other = stock_class(pipe).from_pipe(pipe, transformer=pipe.transformer)
    other.set_progress_bar_config(disable=True)
    assert other.transformer is pipe.transformer
    assert other.scheduler is pipe.scheduler
    if own_scheduler:
        other.scheduler = type(other.scheduler).from_config(other.scheduler.config)
    return other


def break_off_at(step):
    def end(_pipe, now, _time, tensors):
        if now == step:
            raise InterruptedError
        return tensors

    return {"callback_on_step_end": end}


def run_before(pipe, case, before):
    if before == "a call that broke off":
        with pytest.raises(InterruptedError):
            call(pipe, case, **break_off_at(2))
    elif before != "nothing":
        call(pipe, case, num_inference_steps=STEPS if "many" in before else STEPS - 2)


def records(handle):
    return [(each.step, each.branch, each.action.value) for each in handle.report.steps]


def counts(handle):
    return {each.steps_total for each in handle.report.steps}


@functools.cache
def own(case):
    """What an enabled pipeline gives itself: the latents, and its records."""
    pipe = FAMILIES[CASES[case][0]].make()
    with chipsparse.enable(pipe, SPARSE) as handle:
        return call(pipe, case), records(handle)


@functools.cache
def stock(case):
    return call(FAMILIES[CASES[case][0]].make(), case)


def runs_dense(handle):
    """Whether all calls ran dense, and the report and a warning say so and what would help."""
    (fallback,) = handle.report.fallbacks
    sentences = fallback, handle.report.nothing_sparse
    assert all(NOT_PLACED in each and SAY_IT in each for each in sentences)
    return set(handle.report.actions()) == {"dense"}


@pytest.mark.parametrize("before", slow_unless(BEFORE[:1] + BEFORE[2:], BEFORE))
@pytest.mark.parametrize("case", slow_unless(QUICK, CASES))
def test_a_pipeline_with_a_scheduler_of_its_own(case, before):
    pipe = FAMILIES[CASES[case][0]].make()
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


@pytest.mark.parametrize("before", slow_unless(BEFORE[::3], BEFORE))
@pytest.mark.parametrize("case", slow_unless(("flux unnamed", "cogvideox", "z-image"), CASES))
def test_a_pipeline_that_shares_the_scheduler_runs_as_the_enabled_one(case, before):
    pipe = FAMILIES[CASES[case][0]].make()
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
def test_a_strict_run_is_refused(case):
    pipe = FAMILIES[CASES[case][0]].make()
    with chipsparse.enable(pipe, SPARSE, strict=True):
        with pytest.raises(chipsparse.FallbackError, match="does not run this call"):
            call(sharing(pipe), case)
        assert torch.equal(call(pipe, case), own(case)[0])


@pytest.mark.parametrize("case", ["flux unnamed", "hunyuan video", "cogvideox"])
def test_timesteps_that_were_set_for_another_loop_are_noticed(case):
    """The first timestep is that of most schedules."""
    pipe = FAMILIES[CASES[case][0]].make()
    with chipsparse.enable(pipe, SPARSE) as handle:
        other = sharing(pipe)
        pipe.scheduler.set_timesteps(2 * STEPS + 1)
        with pytest.warns(chipsparse.DenseWarning):
            assert_close(call(other, case), stock(case))
        assert runs_dense(handle)


class Callback(diffusers.callbacks.PipelineCallback):
    """As diffusers' own, which say themselves what they want to see."""

    tensor_inputs = ("latents",)

    def __init__(self, function):
        super().__init__(cutoff_step_ratio=1.0)
        self.tensor_inputs = ["latents"]
        self._function = function

    def callback_fn(self, pipeline, step, time, tensors):
        assert list(tensors) == self.tensor_inputs
        return self._function(pipeline, step, time, tensors)


@pytest.mark.parametrize("of_diffusers", [False, True])
@pytest.mark.parametrize("case", ["flux", "cogvideox"])
def test_another_pipeline_in_a_callback(case, of_diffusers):
    pipe = FAMILIES[CASES[case][0]].make()
    inner = []

    def preview(_pipe, step, _time, tensors):
        if step == 2:
            inner.append(call(other, case))
        return tensors

    preview = Callback(preview) if of_diffusers else preview

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


def test_the_transformer_itself_in_a_callback():
    """Its call is a branch of its own; the pipeline goes on with its caches."""
    pipe, given = FAMILIES["flux"].make(), first_call("flux")

    def look(_pipe, step, time, tensors):
        if step == 2:
            timestep = time.expand(len(given["timestep"])) / 1000
            pipe.transformer(**{**given, "timestep": timestep})
        return tensors

    with chipsparse.enable(pipe, SPARSE, strict=True) as handle:
        call(pipe, "flux")
        usual = records(handle)
        call(pipe, "flux", callback_on_step_end=look)
        found = records(handle)
    (more,) = [each for each in found if each[1] == "call0"]
    found.remove(more)
    assert found == usual


def first_call(case):
    """What the transformer is called with at first."""
    pipe, given = FAMILIES[CASES[case][0]].make(), []
    pipe.transformer.register_forward_pre_hook(
        lambda _model, _args, kwargs: given.append(kwargs), with_kwargs=True
    )
    call(pipe, case)
    return given[0]


@pytest.mark.parametrize("begin", [0, 2])
@pytest.mark.parametrize("steps", [True, False], ids=["steps", "never steps"])
@pytest.mark.parametrize("case", ["flux", "cogvideox"])
def test_a_loop_of_the_users(case, steps, begin):
    pipe, given = FAMILIES[CASES[case][0]].make(), first_call(case)
    with chipsparse.enable(pipe, SPARSE, strict=True) as handle, torch.no_grad():
        call(pipe, case)
        for _ in range(2):
            pipe.scheduler.set_timesteps(STEPS)
            for time in pipe.scheduler.timesteps[begin:]:
                timestep = time.expand(len(given["timestep"]))
                timestep = timestep / 1000 if case == "flux" else timestep
                pipe.transformer(**{**given, "timestep": timestep})
                if steps and case == "flux":
                    latents = given["hidden_states"]
                    pipe.scheduler.step(latents, time, latents)
            assert [each.step for each in handle.report.steps] == list(range(begin, STEPS))
            assert counts(handle) == {STEPS}


@pytest.mark.parametrize("guided", [False, True])
def test_parts_without_a_pipeline_say_themselves_whether_a_loop_is_guided(guided):
    """Of a pipeline that is another loop's matter: what it says is of its own last call."""
    pipe = FAMILIES["wan 2.1"].make()
    call(pipe, "wan")
    assert pipe.do_classifier_free_guidance
    parts = SimpleNamespace(
        components=pipe.components,
        scheduler=pipe.scheduler,
        do_classifier_free_guidance=guided,
    )
    for loop_of, branches in ((parts, 1 + guided), (pipe, 1)):
        with chipsparse.enable(loop_of, SPARSE) as handle:
            (adapter,) = handle._adapters
            assert adapter.branches() == branches


ROUNDED = {
    "divided, rounded": lambda time, _: (time / 1000).bfloat16(),
    "filled": lambda time, _: torch.full((1,), float(time) / 1000, dtype=torch.bfloat16)[0],
    "sigma": lambda _, sigma: sigma.bfloat16(),
    "the pipeline's": lambda time, _: time.bfloat16() / 1000,
}


@pytest.mark.parametrize("shift", [1.0, 12.0])
@pytest.mark.parametrize("steps", [True, False], ids=["steps", "never steps"])
@pytest.mark.parametrize("rounded", ROUNDED)
def test_a_loop_of_the_users_that_rounds_its_timesteps(rounded, steps, shift):
    pipe = FAMILIES["flux"].make()
    pipe.scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=shift)
    given = first_call("flux")
    with chipsparse.enable(pipe, SPARSE, strict=True) as handle, torch.no_grad():
        pipe.scheduler.set_timesteps(20)
        for time, sigma in zip(pipe.scheduler.timesteps, pipe.scheduler.sigmas, strict=False):
            timestep = ROUNDED[rounded](time, sigma).expand(len(given["timestep"]))
            pipe.transformer(**{**given, "timestep": timestep})
            if steps:
                latents = given["hidden_states"]
                pipe.scheduler.step(latents, time, latents)
        assert handle.report.generation == 1
        assert {each.step for each in handle.report.steps} <= set(range(20))
        assert len(handle.report.steps) == 20
        assert counts(handle) == {20}


def test_where_nothing_is_to_be_sparse_no_scheduler_is_missed():
    pipe, given = FAMILIES["flux"].make(), first_call("flux")
    config = SPARSE.override({"attention.enabled": False, "mlp.enabled": False})
    with chipsparse.enable(pipe, config, strict=True) as handle, torch.no_grad():
        for value in (1.0, 0.5):
            pipe.transformer(**{**given, "timestep": torch.full_like(given["timestep"], value)})
        assert handle.report.fallbacks == []


def test_a_loop_by_no_scheduler():
    """The pipeline's has the thousand timesteps of its training."""
    pipe, given = FAMILIES["flux"].make(), first_call("flux")
    with chipsparse.enable(pipe, SPARSE) as handle, torch.no_grad():
        with pytest.warns(chipsparse.DenseWarning):
            pipe.transformer(**{**given, "timestep": torch.tensor([1.0])})
        for value in (0.75, 0.5, 0.25):
            pipe.transformer(**{**given, "timestep": torch.tensor([value])})
        assert [each.step for each in handle.report.steps] == [0, 1, 2, 3]
        assert runs_dense(handle)


# Loops of the user's own that say they are one generation.
SKIPPED = SPARSE.override(
    {
        "schedule.refresh_every": 10,
        "schedule.full_steps": [0, 1, 4],
        "schedule.between": "none",
    }
)
NOT_STEPPED = (
    "skipped steps are not corrected: the loop does not step its scheduler as pipelines do"
)


def corrections(handle):
    """What the report notes of correction."""
    return [note for note in handle.report.notes if "corrected" in note]


def own_loop(pipe, given, scheduler=None, *, middle=False, broken=None):
    """The latents of a loop by Euler's or the midpoint method."""
    scheduler = pipe.scheduler if scheduler is None else scheduler
    scheduler.set_timesteps(STEPS, mu=1.0, device="cpu")
    latents, sigmas = given["hidden_states"], scheduler.sigmas

    def velocity(latents, level):
        timestep = level.expand(len(given["timestep"]))
        return pipe.transformer(**{**given, "hidden_states": latents, "timestep": timestep})[0]

    for step, time in enumerate(scheduler.timesteps):
        if step == broken:
            raise InterruptedError
        if middle:
            half = (sigmas[step + 1] - sigmas[step]) / 2
            near = latents + half * velocity(latents, time / 1000)
            latents = latents + 2 * half * velocity(near, sigmas[step] + half)
        else:
            output = velocity(latents, time / 1000)
            latents = scheduler.step(output, time, latents, return_dict=False)[0]
    return latents


@pytest.mark.parametrize("whose", ["the pipeline's", "another"])
def test_a_loop_that_is_a_generation_is_corrected_as_the_pipelines(whose):
    pipe, given = FAMILIES["flux"].make(), {**first_call("flux"), "return_dict": False}
    other = diffusers.FlowMatchEulerDiscreteScheduler.from_config(pipe.scheduler.config)
    scheduler = None if whose == "the pipeline's" else other
    found = {}
    for correct in (True, False):
        config = SKIPPED.override({"schedule.correct": correct})
        with chipsparse.enable(pipe, config) as handle, torch.no_grad():
            with pytest.raises(InterruptedError), handle.generation(scheduler):
                own_loop(pipe, given, scheduler, broken=3)
            assert type(other) is diffusers.FlowMatchEulerDiscreteScheduler
            with handle.generation(scheduler):
                found[correct] = own_loop(pipe, given, scheduler)
            assert [each.action.value for each in handle.report.steps] == (
                ["dense", "dense", "skip", "skip", "dense"] + ["skip"] * (STEPS - 5)
            )
            corrected = [each.step for each in handle.report.steps if each.corrected]
            assert corrected == ([2, 3] if correct else [])
            assert corrections(handle) == handle.report.fallbacks == []
            with handle.generation(scheduler):
                assert torch.equal(own_loop(pipe, given, scheduler), found[correct])
    assert not torch.equal(found[True], found[False])
    with pytest.raises(RuntimeError, match="used up"), handle.generation():
        pass


def test_a_generation_within_another_is_refused_and_one_may_end_its_handle():
    pipe = FAMILIES["flux"].make()
    kind = type(pipe.scheduler)

    def enter(_pipe, _step, _time, tensors):
        with pytest.raises(RuntimeError, match="another one would end it"), handle.generation():
            pass
        return tensors

    handle = chipsparse.enable(pipe, SPARSE)
    assert torch.equal(call(pipe, "flux", callback_on_step_end=enter), own("flux")[0])
    with handle.generation():
        with pytest.raises(RuntimeError, match="another one would end it"), handle.generation():
            pass
        handle.disable()
    assert type(pipe.scheduler) is kind


@pytest.mark.parametrize("within", [True, False])
def test_a_loop_with_levels_of_its_own_runs_dense(within):
    """The midpoint method, whose every other call is at a level that the scheduler has not."""
    pipe, given = FAMILIES["flux"].make(), {**first_call("flux"), "return_dict": False}
    with torch.no_grad():
        expected = own_loop(pipe, given, middle=True)
        with (
            chipsparse.enable(pipe, SKIPPED) as handle,
            pytest.warns(chipsparse.DenseWarning),
            handle.generation() if within else contextlib.nullcontext(),
        ):
            found = own_loop(pipe, given, middle=True)
    assert_close(found, expected)
    assert len(handle.report.steps) == 2 * STEPS or not within
    assert runs_dense(handle)


def test_a_loop_that_does_not_step_the_scheduler_is_not_corrected_and_says_so():
    pipe, given = FAMILIES["flux"].make(), {**first_call("flux"), "return_dict": False}
    found = []
    for correct in (True, False):
        config = SKIPPED.override({"schedule.correct": correct})
        with chipsparse.enable(pipe, config) as handle, torch.no_grad(), handle.generation():
            pipe.scheduler.set_timesteps(STEPS, mu=1.0)
            latents, sigmas = given["hidden_states"], pipe.scheduler.sigmas
            for step, time in enumerate(pipe.scheduler.timesteps):
                timestep = time.expand(len(given["timestep"])) / 1000
                call = {**given, "hidden_states": latents, "timestep": timestep}
                latents = latents + (sigmas[step + 1] - sigmas[step]) * pipe.transformer(**call)[0]
        found.append(latents)
        assert corrections(handle) == ([NOT_STEPPED] if correct else [])
    assert torch.equal(*found)


def test_a_pipeline_that_shares_the_scheduler_is_corrected_as_the_enabled_one():
    pipe = FAMILIES["wan 2.1"].make()
    with chipsparse.enable(pipe, SKIPPED) as handle:
        expected = call(pipe, "wan")
        corrected = [each.step for each in handle.report.steps if each.corrected]
        other = sharing(pipe, own_scheduler=False)
        assert torch.equal(call(other, "wan"), expected)
        assert [each.step for each in handle.report.steps if each.corrected] == corrected != []
        assert corrections(handle) == []


# Where a scheduler is.


def scheduler_at(timesteps, **told):
    return SimpleNamespace(timesteps=torch.tensor(timesteps), **told)


def reading(timestep, dtype=torch.float32):
    called = torch.tensor([timestep]).to(dtype)

    def read(schedule):
        value = value_passed_as(called, schedule)
        return float(called) if value is None else value

    return read


def test_a_step_that_is_told_has_to_be_that_of_the_timestep():
    scheduler = scheduler_at([1000.0, 600.0, 300.0], step_index=1, begin_index=0)
    assert place_of_call(scheduler, reading(600.0)) == 1
    assert place_of_call(scheduler, reading(300.0)) is None
    scheduler.step_index = None
    assert place_of_call(scheduler, reading(1000.0)) == 0
    assert place_of_call(scheduler, reading(600.0)) is None
    scheduler.step_index = 3  # it is done
    assert place_of_call(scheduler, reading(300.0)) is None


def test_behind_a_step_it_may_be_that_one():
    scheduler = scheduler_at([1000.0, 600.0, 300.0], step_index=1, begin_index=0)
    assert place_of_call(scheduler, reading(1000.0)) is None
    assert place_of_call(scheduler, reading(1000.0), behind_step=True) == 0
    assert place_of_call(scheduler, reading(300.0), behind_step=True) is None


def test_without_a_told_step_one_place_comes_after_the_other():
    scheduler = scheduler_at([999, 749, 499, 249])
    assert place_of_call(scheduler, reading(499)) == 2  # where a loop may begin
    assert place_of_call(scheduler, reading(500)) is None
    assert place_of_call(scheduler, reading(749), last=0) == 1
    assert place_of_call(scheduler, reading(749), last=1) == 1
    assert place_of_call(scheduler, reading(499), last=0) is None
    assert place_of_call(scheduler, reading(999), last=3) == 0
    twice = scheduler_at([999, 749, 749])
    assert place_of_call(twice, reading(749)) is None


def test_values_that_are_one_in_half_precision():
    """As of many steps with a large shift."""
    values = [1000.0, 999.0, 998.0, 500.0]
    for step, value in enumerate(values):
        read = reading(value, torch.bfloat16)
        assert place_of_call(scheduler_at(values, step_index=step), read) == step
    assert place_of_call(scheduler_at(values), reading(1000.0, torch.bfloat16)) == 0


def test_a_scheduler_has_to_be_set():
    for made in (
        diffusers.FlowMatchEulerDiscreteScheduler(),
        diffusers.CogVideoXDDIMScheduler(),
        diffusers.UniPCMultistepScheduler(),
        diffusers.DDPMScheduler(),
    ):
        assert not was_set(made)
        made.set_timesteps(4)
        assert was_set(made)
