"""Whatever a model computes with besides its arguments is seen to change, and by its name."""

import pytest
import torch
from torch import nn

from chipsparse.sparse.graphs.model_state import MOST_COMPARED, ModelState

CPU = torch.device("cpu")


class Processor:
    """Like an attention processor: settings, and what leads to other objects."""

    def __init__(self, scale=1.0):
        self.scale = scale
        self.scales = [1.0, 0.5]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("table", torch.ones(2), persistent=False)
        self.plain = torch.ones(3)
        self.tables = [torch.ones(2), torch.ones(3)]
        self.scaling = {"style": 1.0}
        self.active = ["style"]
        self.width = 2
        self.processor = Processor()


@pytest.fixture
def model():
    return nn.Sequential(Block(), Block())


CHANGES = {
    "1.linear._parameters.weight": lambda m: setattr(
        m[1].linear,
        "weight",
        nn.Parameter(torch.ones(2, 2)),
    ),
    "0.linear._parameters.weight": lambda m: setattr(m[0].linear.weight, "data", torch.zeros(2, 2)),
    "0._buffers.table": lambda m: setattr(m[0].table, "data", torch.zeros(2)),
    "0.plain": lambda m: setattr(m[0], "plain", torch.ones(3)),
    "1._modules.linear": lambda m: setattr(m[1], "linear", nn.Linear(2, 2)),
    "_modules.2": lambda m: m.append(nn.Identity()),
    "1.linear._forward_hooks": lambda m: m[1].linear.register_forward_hook(print),
    "1._forward_pre_hooks": lambda m: m[1].register_forward_pre_hook(print),
    "0.scaling.style": lambda m: m[0].scaling.update(style=0.5),
    "0.active.0": lambda m: m[0].active.__setitem__(0, "other"),
    "1.active.1": lambda m: m[1].active.append("other"),
    "0.width": lambda m: delattr(m[0], "width"),
    "1.training": lambda m: m[1].eval(),
    "1.processor": lambda m: setattr(m[1], "processor", Processor()),
    "0.processor.scale": lambda m: setattr(m[0].processor, "scale", 0.0),
    "0._compiled_call_impl": lambda m: setattr(m[0], "_compiled_call_impl", m[0].forward),
    "0.forward": lambda m: setattr(m[0], "forward", lambda x: x),
    "peft_config": lambda m: setattr(m, "peft_config", {"style": object()}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen_by_its_name(name, model):
    state = ModelState(model, CPU)
    assert state.change() is None
    CHANGES[name](model)
    assert state.change() == name
    assert ModelState(model, CPU).change() is None


def test_what_computes_the_same_is_no_change(model):
    state = ModelState(model, CPU)
    with torch.no_grad():
        model[0].linear.weight.mul_(2)  # read where it is
    model[0].plain += 1
    model[0].width = int("2")
    model[0].processor.scale = float("1.0")
    model[0].scaling["style"] = float("1.0")
    model[1].tables = [table.to(CPU) for table in model[1].tables]
    assert state.change() is None
    model[1].tables[1] = torch.zeros(2)
    assert state.change() == "1.tables"


@pytest.mark.parametrize("elements", [1, MOST_COMPARED, MOST_COMPARED + 1])
def test_small_tensors_on_another_device_are_compared_and_larger_ones_not_copied(elements, model):
    model[1].plain = torch.ones(elements)
    state = ModelState(model, torch.device("cuda"))
    assert state.change() is None
    model[1].plain[0] = 2.0
    assert state.change() == ("1.plain" if elements <= MOST_COMPARED else None)
    model[1].plain = model[1].plain.clone()
    assert state.change() == "1.plain"


def test_a_quantized_weight_is_where_its_parts_are(model):
    from torch.testing._internal.two_tensor import TwoTensor

    parts = torch.ones(2, 2), torch.zeros(2, 2)
    model[1].linear.weight = nn.Parameter(TwoTensor(*parts), requires_grad=False)
    state = ModelState(model, CPU)
    assert state.change() is None
    model[1].linear.weight.b.data = torch.ones(2, 2)
    assert state.change() == "1.linear._parameters.weight"


def test_attributes_can_be_ignored_and_what_is_around_the_model_counts(model):
    model.owner = Processor()
    around = {"autocast": False, "precision": "high"}
    state = ModelState(model, CPU, ignored={"owner"}, surroundings=lambda: around)
    model.owner.scale = 3.0
    assert state.change() is None
    model.other = 1
    assert state.change() == "other"
    del model.other
    around["precision"] = "medium"
    assert state.change() == "precision"


def test_objects_are_not_followed_to_others_and_cycles_end(model):
    model[0].scaling["self"] = model[0].scaling
    model[0].processor.block = model[0]
    model[0].processor.owner = Processor()
    model[1].processor.other = model[0].processor
    state = ModelState(model, CPU)
    model[0].processor.owner.scale = 3.0
    assert state.change() is None
    model[0].processor.owner = None
    assert state.change() == "0.processor.owner"
