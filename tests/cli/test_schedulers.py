"""`--scheduler`: which ones go with a model, and what is said of the others."""

import json

import pytest
from diffusers import UniPCMultistepScheduler

from chipsparse.cli.errors import UserError
from chipsparse.cli.model.description import describe_model
from chipsparse.cli.model.schedulers import choose_scheduler
from tests.variants import slow

# Of libraries, as older schedulers are tried with a newer NumPy.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 5.0}


@pytest.fixture
def unipc_model(broken_model):
    """The tiny Wan with the scheduler that the published ones have."""
    UniPCMultistepScheduler(**FLOW).save_pretrained(broken_model / "scheduler")
    path = broken_model / "model_index.json"
    scheduler = {"scheduler": ["diffusers", "UniPCMultistepScheduler"]}
    path.write_text(json.dumps(json.loads(path.read_text()) | scheduler))
    return broken_model


def choose(folder, name, *, sparse=True):
    return choose_scheduler(describe_model(str(folder)), name, sparse=sparse)


def test_the_model_keeps_its_own(unipc_model):
    assert choose(unipc_model, None) is None


@pytest.mark.parametrize(
    "name",
    ["DPMSolverMultistepScheduler", "DPMSolverMultistep", "dpmsolvermulti", "dpm-solver-multistep"],
)
def test_short_names(unipc_model, name):
    made = choose(unipc_model, name)
    assert type(made).__name__ == "DPMSolverMultistepScheduler"
    assert {key: made.config[key] for key in FLOW} == FLOW


USABLE = (
    "for this model use one of DEISMultistepScheduler, DPMSolverMultistepScheduler, "
    "DPMSolverSinglestepScheduler, UniPCMultistepScheduler"
)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("nonsense", f"--scheduler nonsense is none of diffusers' schedulers; {USABLE}"),
        ("", "--scheduler is empty; leave it out for the model's own"),
        (
            "DPMSolver",
            "--scheduler DPMSolver may be DPMSolverMultistepScheduler or "
            "DPMSolverSinglestepScheduler; write more of it",
        ),
        slow(
            "DDIMScheduler", "--scheduler DDIMScheduler does not work here: prediction_type given"
        ),
        slow(
            "FlowMatchEulerDiscrete",
            "--scheduler FlowMatchEulerDiscreteScheduler takes another config than this model has",
        ),
        ("Heun", "--scheduler HeunDiscreteScheduler does not work here: "),
    ],
)
def test_what_does_not_go_with_the_model(unipc_model, name, sentence):
    with pytest.raises(UserError) as error:
        choose(unipc_model, name)
    assert str(error.value).startswith(sentence)


def test_schedulers_that_call_the_model_twice_are_for_dense_runs(unipc_model):
    UniPCMultistepScheduler().save_pretrained(unipc_model / "scheduler")  # epsilon: Heun can
    with pytest.raises(UserError, match="calls the transformer 2 times per denoising step"):
        choose(unipc_model, "HeunDiscrete")
    assert type(choose(unipc_model, "HeunDiscrete", sparse=False)).__name__.startswith("Heun")


def test_the_command_runs_with_it(generate, unipc_model):
    def sparse(*arguments):
        return generate(
            "-o", "o.png", "--frames", "1", "--json", *arguments, model=unipc_model
        ).json()

    assert sparse()["scheduler"] is None
    made = sparse("--scheduler", "deis")
    assert made["scheduler"] == "DEISMultistepScheduler"
    assert [step["action"] for step in made["sparse"]["steps"]].count("sparse") == 2


def test_an_unknown_one_is_refused_before_loading(generate, unipc_model, loads_nothing):
    error = generate("--scheduler", "nonsense", model=unipc_model).refused()
    assert "none of diffusers' schedulers" in error
