"""What a fused module would get wrong is refused in one line, at fuse or in the call; or left to torch by parts."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.exporter]


def refused(forward, match, **attributes):
    """A convolution and this forward cannot be fused, for this reason."""
    from fused_networks import images
    from torch import nn

    import bnfuse.torch
    from bnfuse.core.errors import BnfuseError

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)
            self.register_buffer("seen", nn.Parameter(images(1)).detach().mean((0, 2, 3)))
            self.calls = 0
            for name, value in attributes.items():
                setattr(self, name, value)

        def forward(self, x):
            return forward(self, x)

    with pytest.raises(BnfuseError, match=match) as caught:
        bnfuse.torch.fuse(Odd(), images())
    assert "\n" not in str(caught.value)


def without(module, x):
    import torch

    with torch.no_grad():
        scale = module.conv(x)
    return module.conv(x) * scale


def straight_through(module, x):
    import torch

    class Round(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.round()

        @staticmethod
        def backward(ctx, dy):
            return dy

    return Round.apply(module.conv(x))


def test_a_function_whose_apply_was_bound_before():
    import torch

    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, dy):
            return -dy

    reverse = Reverse.apply  # as at the top of a file
    refused(lambda m, x: reverse(m.conv(x)), "the autograd.Function 'Reverse'")
    x = torch.ones(2, requires_grad=True)
    reverse(x).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [-1, -1]


def hooked(module, x):
    y = module.conv(x)
    y.register_hook(lambda dy: 2 * dy)
    return y


def counting(module, x):
    module.calls += 1
    return module.conv(x)


def logging(module, x):
    module.log.append(1)
    return module.conv(x)


def test_a_list_that_a_forward_adds_to_is_refused_and_left_as_it_was():
    log: list[int] = []
    refused(logging, "changes the attribute 'log'", log=log)
    assert log == []


def dropping(module, x):
    import random

    return module.conv(x) if random.random() < 0.5 else 2 * module.conv(x)


def counted(module, x):
    module.seen += x.mean((0, 2, 3))
    return module.conv(x)


@pytest.mark.parametrize(
    ("forward", "match"),
    [
        (lambda m, x: m.conv(x) * m.conv(x).detach(), "detaches a tensor"),
        (without, "turns gradients off"),
        (straight_through, "the autograd.Function 'Round'"),
        (hooked, "a tensor with a hook"),
        (counted, "changes 'seen' in place"),
        (counting, "changes the attribute 'calls'"),
        (dropping, "draws by Python's or numpy's random"),
        (lambda m, x: m.conv(x.mul_(2)), "changes its input in place"),
        (lambda m, x: (m.conv(x), x), "returns an input or a parameter as it is"),
        (lambda m, x: m.conv(x).argmax(1), "returns a tensor of torch.int64"),
        (lambda m, x: m.conv(x) if x.sum() > 0 else x, "torch.export cannot capture it"),
    ],
)
def test_what_has_other_gradients_or_effects_than_its_operators(forward, match):
    refused(forward, match)


def test_inference_mode_kept_tensors_and_moving_statistics_of_instance_norms():
    import torch
    from fused_networks import images
    from torch import nn

    import bnfuse.torch
    from bnfuse.core.errors import BnfuseError

    def inferred(module, x):
        with torch.inference_mode():
            y = module.conv(x)
        return y.clone()

    def keeping(module, x):
        module.conv.feature = module.conv(x)
        return module.conv.feature

    refused(inferred, "turns gradients off")
    refused(keeping, "the attribute 'conv.feature'")
    norms = nn.Sequential(nn.Conv2d(3, 4, 1), nn.InstanceNorm2d(4, track_running_stats=True))
    with pytest.raises(BnfuseError, match="moves running statistics"):
        bnfuse.torch.fuse(norms, images())


def test_a_tensor_with_a_gradient_that_is_no_parameter():
    import torch

    refused(
        lambda m, x: m.conv(x) * m.scale, "'scale' is a tensor with a gradient", scale=torch.ones(1).requires_grad_()
    )


def test_hooks_of_submodules_and_of_all_modules(fused):
    import torch
    from fused_networks import images

    from bnfuse.core.errors import BnfuseError

    for register in ("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"):
        handle = getattr(fused.stem[0], register)(lambda *_: None)
        with pytest.raises(BnfuseError, match=r"submodule 'stem\.0' has a (forward|backward)"):
            fused(images())
        handle.remove()
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    with pytest.raises(BnfuseError, match="a hook for all modules"):
        fused(images())
    handle.remove()
    fused(images())
    handle = fused.register_forward_hook(lambda module, inputs, result: result * 2)  # its own are called
    torch.testing.assert_close(fused(images()), 2 * fused.forward(images()))
    handle.remove()


def test_a_call_that_cannot_be_honoured_is_left_to_torch_where_that_is_asked_for(fused, caplog):
    import dataclasses

    import torch
    from fused_networks import images, made

    engine = fused._bnfuse
    engine.options = dataclasses.replace(engine.options, fallback="torch")
    seen = []
    handle = fused.stem[0].register_forward_hook(lambda module, inputs, result: seen.append(result.shape))
    found = [fused(images()), fused(images())]
    assert [tuple(shape) for shape in seen] == [(4, 8, 8, 8)] * 2
    torch.testing.assert_close(found[0], made()(images()))
    assert [one.getMessage() for one in caplog.records if "left to torch: submodule 'stem.0'" in one.getMessage()]
    handle.remove()
    assert fused(images()).grad_fn.name() != found[0].grad_fn.name()


def test_weights_that_are_made_anew_by_a_hook_are_refused_and_by_a_parametrization_fused():
    from fused_networks import distance, doubled, gradients, images
    from torch import nn

    import bnfuse.torch
    from bnfuse.core.errors import BnfuseError

    def net(norm):
        return nn.Sequential(norm(nn.Conv2d(3, 4, 3)), nn.ReLU(), nn.Conv2d(4, 4, 1))

    with (
        pytest.warns(FutureWarning),
        pytest.raises(BnfuseError, match=r"'0' has torch.nn.utils.weight_norm, "),
    ):
        bnfuse.torch.fuse(net(nn.utils.weight_norm), images())
    module = net(nn.utils.parametrizations.weight_norm)
    exact = doubled(module)
    fused = bnfuse.torch.fuse(module, images())
    for one, x in ((fused, images()), (exact, images().double())):
        one(x).square().mean().backward()
    assert distance(gradients(fused), gradients(exact)) < 1e-5


def test_exporters_see_the_operators(fused):
    import torch
    from fused_networks import images

    program = torch.export.export(fused.eval(), (images(),), strict=False)
    assert program.graph_signature.user_inputs == ("x",)  # as its forward calls it
    assert {"aten.conv2d.default", "aten.cat.default"} <= {str(node.target) for node in program.graph.nodes}


def test_what_is_no_module_to_fuse(first):
    import torch
    from fused_networks import images
    from torch import nn

    import bnfuse.torch
    from bnfuse.core.errors import BnfuseError

    for module, options, match in (
        (first[1], {}, "fused already"),
        (nn.DataParallel(nn.Conv2d(3, 4, 1)), {}, "fuse the module that it holds"),
        (torch.relu, {}, "takes an nn.Module"),
        (nn.Conv2d(3, 4, 1), {"fallback": "eager"}, "fallback 'eager' is unknown"),
        (nn.Conv2d(3, 4, 1), {"precision": "fp8"}, "there is no precision 'fp8': there is fp32, tf32, bf16, fp16"),
        (nn.Conv2d(3, 4, 1).bfloat16(), {}, "'weight' is bfloat16"),
        (nn.Identity(), {}, "returns an input"),
    ):
        with pytest.raises(BnfuseError, match=match):
            bnfuse.torch.fuse(module, images(), **options)
    with pytest.raises(BnfuseError, match="has no report"):
        bnfuse.torch.report(first[0])


def test_parts_are_fused_around_what_is_left_to_torch():
    import torch
    from fused_networks import conv_norm, distance, doubled, gradients, images, made, state
    from torch import nn

    import bnfuse.torch

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.front, self.back, self.twice = conv_norm(3, 8), conv_norm(8, 8), conv_norm(8, 8)

        def forward(self, x):
            x = self.front(x)
            if x.sum() > 0:  # depends on the data
                x = x * 2
            return self.twice(self.twice(self.back(x))).mean((1, 2, 3))

    module = made(Odd)
    exact = doubled(module)
    before = dict(module.named_modules())
    fused = bnfuse.torch.fuse(module, images(), fallback="torch")
    told = bnfuse.torch.report(fused)
    assert told.fused == ("front", "back") and set(told.left) == {"", "twice", "twice.1"}
    assert "several times" in told.left["twice"] and "torch.export" in told.left[""]
    assert all(dict(module.named_modules())[name] is one for name, one in before.items())
    for one, x in ((fused, images()), (exact, images().double())):
        (one(x) * torch.arange(4)).sum().backward()
    assert distance(gradients(fused), gradients(exact)) < 1e-5 and distance(state(fused), state(exact)) < 1e-5
    fused.eval(), exact.eval()
    torch.testing.assert_close(fused(images()).double(), exact(images().double()), rtol=1e-4, atol=1e-5)
