"""Clean samples of diffusers' samplers, and skipped steps that reuse them where noise is added."""

import diffusers
import pytest
import torch

from chipsparse.skip.clean_samples import NoisySteps, clean_sample_form, step_parameters
from chipsparse.skip.correction import latents_of
from chipsparse.skip.step_log import StepKind, StepOrigin
from tests.tiny_models import FLOW

# Of diffusers' older schedulers, which mix tensors and NumPy arrays.
pytestmark = pytest.mark.filterwarnings("ignore:.*__array:DeprecationWarning")

SHAPE = (1, 4, 6, 6)
TARGET = torch.linspace(-1, 1, 144).reshape(SHAPE)  # what an ideal model predicts


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def random(seed):
    return torch.randn(SHAPE, generator=seeded(seed))


# Each adds noise; its name, and how to make it.
SAMPLERS = {
    "euler stochastic": lambda: diffusers.FlowMatchEulerDiscreteScheduler(stochastic_sampling=True),
    "flow lcm": lambda: diffusers.FlowMatchLCMScheduler(shift=3.0),
    "ltx ancestral": lambda: diffusers.LTXEulerAncestralRFScheduler(eta=0.6),
    "sde-dpm flow": lambda: diffusers.DPMSolverMultistepScheduler(
        algorithm_type="sde-dpmsolver++",
        **FLOW,
    ),
    **{
        f"{name} {prediction}": lambda make=make, prediction=prediction: make(
            prediction_type=prediction,
        )
        for prediction in ("epsilon", "v_prediction", "sample")
        for name, make in {
            "ancestral": diffusers.EulerAncestralDiscreteScheduler,
            "ddpm": lambda **more: diffusers.DDPMScheduler(clip_sample=False, **more),
            "ddim": lambda **more: diffusers.DDIMScheduler(clip_sample=False, **more),
            "lcm": diffusers.LCMScheduler,
            "sde-dpm": lambda **more: diffusers.DPMSolverMultistepScheduler(
                algorithm_type="sde-dpmsolver++",
                **more,
            ),
            "stochastic adams": diffusers.SASolverScheduler,
            "sde-dpm, one step": lambda **more: diffusers.DPMSolverSinglestepScheduler(
                algorithm_type="sde-dpmsolver++",
                solver_order=1,
                **more,
            ),
        }.items()
        if (name, prediction) != ("ancestral", "sample")  # which it does not have
    },
}
each_sampler = pytest.mark.parametrize("make", SAMPLERS.values(), ids=SAMPLERS)


def options_of(scheduler):
    """What makes a scheduler add noise whose config does not."""
    return {"eta": 1.0} if isinstance(scheduler, diffusers.DDIMScheduler) else {}


def own_clean_sample(scheduler, step, output, sample):
    """What the sampler itself computes of the clean sample, by its own code."""
    timestep = scheduler.timesteps[step]
    if hasattr(scheduler, "convert_model_output"):
        scheduler._init_step_index(timestep)
        return scheduler.convert_model_output(output, sample=sample)
    if hasattr(scheduler, "alphas_cumprod"):
        more = {**options_of(scheduler), "generator": seeded()}
        stepped = scheduler.step(output, timestep, sample, **more)
        if not isinstance(scheduler, diffusers.LCMScheduler):
            return stepped.pred_original_sample
        # Of the clean sample it takes a part that depends on the timestep, and of the latents.
        of_latents, of_clean = scheduler.get_scalings_for_boundary_condition_discrete(timestep)
        return (stepped.denoised - of_latents * sample) / of_clean
    # In a straight flow the last step leads to the clean sample.
    scheduler.sigmas[step + 1 :] = 0.0
    return latents_of(scheduler.step(output, timestep, sample, generator=seeded()))


@each_sampler
def test_the_form_is_what_the_sampler_computes(make):
    sample = random(1)
    output = 0.3 * random(2)
    for step in (1, 4):
        scheduler = make()
        scheduler.set_timesteps(8)
        form = clean_sample_form(scheduler, step, {"timestep": scheduler.timesteps[step]})
        clean = form.clean(sample, output)
        torch.testing.assert_close(form.output(sample, clean, output), output)
        expected = own_clean_sample(scheduler, step, output, sample)
        torch.testing.assert_close(clean, expected, rtol=1e-4, atol=1e-4)


class Loop:
    """The steps of a scheduler, and what they told; `is_at` says where an output comes from."""

    def __init__(self, scheduler):
        self.scheduler = scheduler
        self.told = []  # whether the clean sample of each step with noise is known
        self.now = None
        self.steps = NoisySteps(
            scheduler,
            scheduler.step,
            step_parameters(scheduler),
            lambda: self.now,
            self.tell,
        )

    def tell(self, scheduler, is_known):
        assert scheduler is self.scheduler
        self.told.append(is_known)

    def is_at(self, step, kind):
        self.now = StepOrigin(step, kind, frozenset({"one"}))


class Ideal(Loop):
    """A loop whose model always predicts `TARGET`, whatever the noise."""

    def __init__(self, make):
        super().__init__(make())

    def run(self, letters, *, reuses=True):
        scheduler = self.scheduler
        scheduler.set_timesteps(len(letters))
        latents = random(3) * getattr(scheduler, "init_noise_sigma", 1.0)
        noise = seeded(5)
        found = []
        output = None
        for step, letter in enumerate(letters):
            timestep = scheduler.timesteps[step]
            if letter == "F":
                form = clean_sample_form(scheduler, step, {"timestep": timestep})
                output = form.output(latents, TARGET, torch.zeros(SHAPE))
            self.is_at(step, StepKind.FULL if letter == "F" else StepKind.REUSED)
            call = self.steps if reuses else scheduler.step
            more = {**options_of(scheduler), "generator": noise}
            latents = latents_of(call(output, timestep, latents, return_dict=False, **more))
            found.append(latents)
        return found


@each_sampler
def test_what_an_ideal_model_predicts_is_exact_over_skipped_steps(make):
    expected = Ideal(make).run("FFFFFFFFFF")
    loop = Ideal(make)
    found = loop.run("FFKFKKKKFK")
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    # Computed steps that drew noise: the last ones of some samplers draw none.
    assert loop.told
    assert all(loop.told)
    if "sample" not in str(loop.scheduler.config.get("prediction_type")):
        held = Ideal(make).run("FFKFKKKKFK", reuses=False)
        assert (held[7] - expected[7]).abs().max() > 0.01


class Deterministic:
    """Keeps what it is given."""

    def __init__(self):
        self.config = {}
        self.outputs = []

    def step(self, model_output, timestep, sample):
        self.outputs.append(model_output)
        return (sample + model_output,)


def test_a_sampler_that_draws_nothing_gets_its_outputs_as_they_are():
    scheduler = Deterministic()
    now = None
    steps = NoisySteps(
        scheduler,
        scheduler.step,
        step_parameters(scheduler),
        lambda: now,
        pytest.fail,
    )
    given = []
    for step, kind in enumerate([StepKind.FULL, StepKind.REUSED] * 2):
        now = StepOrigin(step, kind, frozenset({"one"}))
        given.append(random(step))
        steps(given[-1], timestep=torch.tensor(1.0), sample=random(9))
    assert all(one is other for one, other in zip(scheduler.outputs, given, strict=True))


class Unknown(Deterministic):
    """Adds noise in a way of its own."""

    def step(self, model_output, timestep, sample):
        self.outputs.append(model_output)
        return (sample + torch.randn(SHAPE),)


def test_a_sampler_that_is_not_known_is_told_and_gets_its_outputs_as_they_are():
    scheduler = Unknown()
    loop = Loop(scheduler)
    given = []
    for step, kind in enumerate((StepKind.FULL, StepKind.REUSED)):
        loop.is_at(step, kind)
        given.append(random(step))
        loop.steps(given[-1], torch.tensor(1.0), random(9))
    assert loop.told == [False]
    assert scheduler.outputs[1] is given[1]


def run_two_levels(scheduler, letters, outputs, levels):
    """The outputs that a scheduler got, whose levels are set by hand."""
    now = None
    got = []

    def step(model_output, timestep, sample, generator=None, return_dict=True):
        got.append(model_output)
        return type(scheduler).step(
            scheduler,
            model_output,
            timestep,
            sample,
            generator=generator,
            return_dict=False,
        )

    steps = NoisySteps(scheduler, step, step_parameters(scheduler), lambda: now, lambda *_: None)
    scheduler.set_timesteps(len(letters))
    scheduler.sigmas = torch.tensor(levels)
    kinds = {"F": StepKind.FULL, "S": StepKind.SPARSE, "K": StepKind.REUSED}
    for index, letter in enumerate(letters):
        now = StepOrigin(index, kinds[letter], frozenset({"one"}))
        steps(outputs[index], scheduler.timesteps[index], random(7), generator=seeded())
    return got


LEVELS = [0.9, 0.8, 0.7, 0.6, 0.5, 0.0]


@pytest.mark.parametrize(
    ("letters", "part"),
    [("FFKKF", (0.25, 1 / 3)), ("FSKKF", (0.0, 0.0)), ("SFKKF", (0.0, 0.0))],
    ids=["two full steps", "the last one sparse", "the one before sparse"],
)
def test_a_part_of_the_line_of_two_full_steps_is_added(letters, part):
    outputs = [random(index) for index in range(5)]
    sample = random(7)
    got = run_two_levels(diffusers.LTXEulerAncestralRFScheduler(eta=0.5), letters, outputs, LEVELS)
    first, last = (sample - LEVELS[index] * outputs[index] for index in (0, 1))
    for index, share in zip((2, 3), part, strict=True):
        clean = last + share * (last - first)
        expected = (sample - clean) / LEVELS[index]
        torch.testing.assert_close(got[index], expected, rtol=1e-4, atol=1e-4)


def test_no_line_where_all_noise_is_new():
    outputs = [random(index) for index in range(5)]
    got = run_two_levels(diffusers.FlowMatchLCMScheduler(shift=1.0), "FFKKF", outputs, LEVELS)
    clean = random(7) - 0.8 * outputs[1]
    torch.testing.assert_close(got[2], (random(7) - clean) / 0.7, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("levels", [[0.9, 0.9, 0.7, 0.0, 0.0, 0.0], [0.5, 0.9, 0.95, 0.0, 0.5, 0]])
def test_levels_that_repeat_rise_or_are_0_give_finite_outputs(levels):
    outputs = [random(index) for index in range(5)]
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(stochastic_sampling=True)
    got = run_two_levels(scheduler, "FFKKK", outputs, [float(level) for level in levels])
    assert all(output.isfinite().all() for output in got)
    torch.testing.assert_close(got[3], outputs[3])  # latents without noise


def test_tokens_have_levels_of_their_own():
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(stochastic_sampling=True)
    scheduler.set_timesteps(4)
    tokens = torch.tensor([[0.0, 500.0, 250.0]])
    form = clean_sample_form(scheduler, 1, {"per_token_timesteps": tokens})
    sample = torch.randn(1, 3, 5, generator=seeded(1))
    output = torch.randn(1, 3, 5, generator=seeded(2))
    expected = sample - torch.tensor([0.0, 0.5, 0.25])[:, None] * output
    torch.testing.assert_close(form.clean(sample, output), expected)
    other = torch.zeros_like(sample)
    leading = form.output(sample, torch.ones_like(sample), other)
    assert torch.equal(leading[:, 0], other[:, 0])
    torch.testing.assert_close(form.clean(sample, leading)[:, 1:], torch.ones(1, 2, 5))


class Renamed(diffusers.FlowMatchLCMScheduler):
    def step(self, model_output, t, sample, **more):
        return super().step(model_output, t, sample, **more)


class Anything(diffusers.FlowMatchLCMScheduler):
    def step(self, *args, **more):
        return super().step(*args, **more)


def set_by_the_user():
    scheduler = diffusers.FlowMatchLCMScheduler()
    stock = scheduler.step
    scheduler.step = lambda *args, **more: stock(*args, **more)
    return scheduler


@pytest.mark.parametrize("make", [Renamed, Anything, set_by_the_user])
def test_a_step_of_the_users_may_name_its_parameters_otherwise(make):
    expected = Ideal(make).run("FFFFFFFFFF")
    loop = Ideal(make)
    found = loop.run("FFKFKKKKFK")
    assert loop.told
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


class Bare:
    """No class of diffusers: it has no config, and its step other names."""

    def step(self, velocity, t, latents):
        self.got = velocity
        return (latents + torch.randn(SHAPE),)


@pytest.mark.parametrize(
    ("scheduler", "channels"),
    [(Bare(), 4), (diffusers.DDPMScheduler(variance_type="learned_range"), 8)],
    ids=["without a config", "with a variance in its outputs"],
)
def test_what_has_no_clean_sample_is_told_and_steps_as_it_is(scheduler, channels):
    loop = Loop(scheduler)
    output = torch.cat([random(1), random(2)], dim=1)[:, :channels]
    for step, kind in enumerate((StepKind.FULL, StepKind.REUSED)):
        loop.is_at(step, kind)
        latents = latents_of(loop.steps(output, 500 - step, random(9)))
        assert latents.isfinite().all()
    assert loop.told == [False]


def test_euler_has_two_kinds_of_prediction():
    scheduler = diffusers.EulerDiscreteScheduler(prediction_type="sample")
    scheduler.set_timesteps(4)
    assert clean_sample_form(scheduler, 1, {}) is None
