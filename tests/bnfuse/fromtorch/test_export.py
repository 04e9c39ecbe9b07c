"""A torch module becomes a training graph as it is, stays as it was, and is refused where a graph would differ."""

from __future__ import annotations

import random

import numpy as np
import onnxruntime
import pytest
from onnx import numpy_helper

import bnfuse
from bnfuse.build import build, build_training_graph
from bnfuse.core.errors import BnfuseError
from bnfuse.graph.module_state import ModuleState
from bnfuse.graph.signature import METADATA_KEY, GraphSignature

pytestmark = [pytest.mark.torch, pytest.mark.exporter]


def metadata(model):
    return {entry.key: entry.value for entry in model.metadata_props}


def signature_of(model):
    return GraphSignature.from_json(metadata(model)[METADATA_KEY])


def step_of(model, x, y):
    """Results of one step in onnxruntime, by name."""
    signature = signature_of(model)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    feeds = {signature.data[0]: x.numpy(), signature.labels[0]: y.numpy()}
    return dict(zip(names, session.run(names, feeds), strict=True))


@pytest.fixture(scope="module")
def built():
    from torch_modules import images, small

    module = small()
    return module, build(module, example=images())


def test_a_step_is_that_of_torch(built):
    from torch_modules import images, in_float64, labels

    module, found = built
    signature, results = signature_of(found.model), step_of(found.model, images(), labels())
    loss, gradients, buffers = in_float64(module, images(), labels())
    assert results[signature.loss] == pytest.approx(loss, rel=1e-6)
    assert set(signature.gradients) == set(gradients)
    for name, output in signature.gradients.items():
        np.testing.assert_allclose(results[output], gradients[name], rtol=1e-4, atol=1e-6, err_msg=name)
    assert "2 BatchNormalization nodes made to train (they are in training mode in the module)" in found.notes
    assert len(signature.running) == 4
    for name, output in signature.running.items():
        np.testing.assert_allclose(results[output], buffers[name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_names_and_values_are_the_modules(built):
    module, found = built
    state = {name: value.detach().numpy() for name, value in module.state_dict().items()}
    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in found.model.graph.initializer}
    about = ModuleState.from_metadata(metadata(found.model))
    assert set(about.names) | set(about.unread) | set(about.tracked) | set(about.constants) == set(state)
    assert about.unread == ("spare",)
    assert dict(about.tracked) == {"norm1.num_batches_tracked": 7, "norm2.num_batches_tracked": 7}
    for name in about.names:
        np.testing.assert_array_equal(values[name], state[name])


def test_the_module_and_all_random_generators_stay_as_they_were():
    import torch
    from torch_modules import images, small

    module = small()
    module.norm2.eval()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    drawn = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy())  # noqa: NPY002
    grads = torch.is_grad_enabled()
    build(module, example=images())
    assert (torch.equal(torch.get_rng_state(), drawn[0]), random.getstate() == drawn[1]) == (True, True)
    np.testing.assert_array_equal(np.random.get_state()[1], drawn[2])  # noqa: NPY002
    assert torch.is_grad_enabled() == grads
    after = module.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert [part.training for part in module.children()] == [True, True, True, False, True, True]
    assert all(
        type(value) in (torch.Tensor, torch.nn.Parameter) for value in module.state_dict(keep_vars=True).values()
    )


def test_what_is_frozen_in_the_module_stays_frozen():
    from torch_modules import images, small

    module = small()
    module.norm1.eval()
    module.stem.weight.requires_grad_(False)
    found = build(module, example=images())
    signature = signature_of(found.model)
    assert sorted(signature.running) == ["norm2.running_mean", "norm2.running_var"]
    assert {"stem.weight", "norm1.running_mean", "norm1.running_var"} <= set(signature.frozen)
    assert any("requires_grad=False" in note for note in found.notes)
    module.norm2.eval()
    asked = signature_of(build(module, example=images(), train=["*", "stem.weight"]).model)
    assert "stem.weight" in asked.trainable
    assert not asked.running


def test_tied_weights_are_one_tensor_with_both_names():
    from torch_modules import images, small

    model = build_training_graph(small(tied=True), example=images())
    about = ModuleState.from_metadata(metadata(model))
    assert about.names["again.weight"] == about.names["conv.weight"]
    assert [name for name in signature_of(model).trainable if name in ("again.weight", "conv.weight")] == [
        about.names["conv.weight"]
    ]


def test_a_norm_that_is_called_twice_counts_twice():
    import torch
    from torch import nn
    from torch_modules import images

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.other = nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2), nn.BatchNorm2d(2)
            self.head = nn.Linear(2, 2)

        def forward(self, x):
            return self.head(self.other(self.norm(self.conv(self.norm(x)))).mean((2, 3)))

    module = Twice()
    model = build(module, example=images()).model
    assert ModuleState.from_metadata(metadata(model)).calls == {"norm.num_batches_tracked": 2}
    step = bnfuse.compile(model, optimizer=bnfuse.SGD(lr=0.1), threads=1)
    for _ in range(3):
        module(images())
        step(images(), torch.zeros(len(images()), dtype=torch.int64))
    expected = {name: int(one) for name, one in module.state_dict().items() if name.endswith("tracked")}
    assert {name: int(one) for name, one in step.state_dict(torch=True).items() if name in expected} == expected
    assert expected["norm.num_batches_tracked"] == 6


def test_a_torch_that_is_too_old_is_told(monkeypatch):
    import torch
    from torch_modules import images, small

    monkeypatch.setattr(torch, "__version__", "2.4.1+cpu")
    with pytest.raises(BnfuseError, match=r"need torch 2\.7 or newer, and torch 2\.4\.1\+cpu is installed"):
        build(small(), example=images())


def test_wrappers_are_looked_through():
    import torch
    from torch_modules import images, small

    model = build_training_graph(torch.compile(torch.nn.DataParallel(small())), example=images())
    assert "stem.weight" in signature_of(model).trainable


def changed(change):
    from torch_modules import small

    module = small()
    original = type(module).forward

    class Changed(type(module)):
        def forward(self, images):
            return change(self, original, images)

    module.__class__ = Changed
    return module


def by_python(self, forward, x):
    return forward(self, x) * (2.0 if random.random() < 0.5 else 1.0)


def by_numpy(self, forward, x):
    return forward(self, x) * float(np.random.rand())  # noqa: NPY002


def detached(self, forward, x):
    import torch

    return forward(self, torch.relu(self.norm1.weight).detach()[0] * x)


def without_gradients(self, forward, x):
    import torch

    with torch.no_grad():
        shift = self.head.bias * 2
    return forward(self, x) + shift


def own_function(self, forward, x):
    import torch

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            return x * 2

        @staticmethod
        def backward(context, gradient):
            return gradient * 3

    return Twice.apply(forward(self, x))


def bound_before(self, forward, x):
    return BOUND[0](forward(self, x))


BOUND: list = []  # of functions, as a file has them that binds `apply` at its top


@pytest.fixture(autouse=True, scope="module")
def bound():
    torch = pytest.importorskip("torch")

    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            return x.view_as(x)

        @staticmethod
        def backward(context, gradient):
            return -gradient

    BOUND.append(Reverse.apply)


def updating(self, forward, x):
    self.gain.add_(1)
    return forward(self, x)


def branching(self, forward, x):
    return forward(self, x) if x.sum() > 0 else forward(self, -x)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (by_python, "draws by Python's or numpy's random"),
        (by_numpy, "draws by Python's or numpy's random"),
        (detached, "Changed: detaches a tensor"),
        (without_gradients, r"Changed: turns gradients off \(torch.no_grad\)"),
        (own_function, "the autograd.Function 'Twice' has a gradient that is not that of its operators"),
        (bound_before, "the autograd.Function 'Reverse' has a gradient"),
        (updating, "its forward updates buffer 'gain'"),
        (branching, "torch.export cannot capture it: "),
    ],
)
def test_what_a_graph_would_train_otherwise_is_refused(change, message):
    from torch_modules import images

    module = changed(change)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(BnfuseError, match=message) as caught:
        build(module, example=images())
    assert "\n" not in str(caught.value)
    assert all((module.state_dict()[name] == value).all() for name, value in before.items())


def test_hooks_on_gradients_and_shared_memory_are_refused():
    from torch_modules import images, small

    module = small()
    handle = module.conv.register_full_backward_hook(lambda *_: None)
    with pytest.raises(BnfuseError, match="Small: 'conv' has a backward hook"):
        build(module, example=images())
    handle.remove()
    module.again.weight.data = module.conv.weight.data
    with pytest.raises(BnfuseError, match=r"'conv.weight' and 'again.weight' are two that share their memory"):
        build(module, example=images())


def test_sources_that_are_not_said_whole_are_refused():
    import torch
    from torch_modules import images, small

    module = small()
    with pytest.raises(BnfuseError, match="Small: give an example of what it is called with"):
        build(module)
    with pytest.raises(BnfuseError, match="the batch of its example: leave batch=8 out"):
        build(module, example=images(), batch=8)
    with pytest.raises(BnfuseError, match=r"in evaluation mode.*call .train\(\)"):
        build(module.eval(), example=images())
    program = torch.export.export(module.train(), (images(),), strict=False)
    with pytest.raises(BnfuseError, match="has its own example"):
        build(program, example=images())
    with pytest.raises(BnfuseError, match="an example is for torch modules"):
        build("net.onnx", example=images())


def two_heads(self, forward, x):
    scores = forward(self, x)
    return {"main": scores, "aux": scores * 2}


def test_arguments_and_results_have_their_names_in_the_module():
    from torch_modules import images

    loss = "cross-entropy@main + 0.4*cross-entropy@aux"
    signature = signature_of(build_training_graph(changed(two_heads), example={"images": images()}, loss=loss))
    assert signature.data == ("images",)
    assert signature.labels == ("labels_main", "labels_aux")


def test_a_module_that_computes_by_the_batch_is_of_its_batch_alone():
    import torch
    from torch import nn

    from bnfuse.graph.batches import with_batch
    from bnfuse.graph.training_graph import open_graph

    class Odd(nn.Module):
        def __init__(self, power: int) -> None:
            super().__init__()
            self.power = power
            self.body = nn.Sequential(
                nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 1)), nn.BatchNorm2d(4), nn.Flatten()
            )

        def forward(self, x):
            return self.body(x) / x.shape[0] ** self.power

    for power in (0, 1):
        model = build(Odd(power), example=torch.randn(4, 3, 2, 2)).model
        assert sum("original1" in name for name in signature_of(model).gradients) == 1
        if power:
            with pytest.raises(BnfuseError, match="computes by the number of samples"):
                with_batch(open_graph(model, name="odd"), 6)
        else:
            assert with_batch(open_graph(model, name="odd"), 6).batch == 6


def test_tensors_with_the_names_of_results_stay_themselves():
    import torch
    from fused_networks import images
    from torch import nn

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)
            self.mul = nn.Parameter(torch.ones(4))

        def forward(self, x):
            y = self.conv(x).mean((2, 3))
            return y * y * self.mul

    from bnfuse.fromtorch.export import exported

    model = exported(Odd(), images())
    made = {name for node in model.graph.node for name in node.output}
    assert "mul" in {tensor.name for tensor in model.graph.initializer} - made
    bad = model.graph.node.add(op_type="Neg", input=["mul"], output=["mul"])
    assert bad.output
    with pytest.raises(BnfuseError, match="an initializer and the result of a node of one name"):
        build(model)
