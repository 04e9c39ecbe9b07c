"""Where maps or gradients add up: identity BatchNorms, skips past an activation, pre-activation."""

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

import bnfuse

IDENTITY = """
    a = conv(x, 6)
    n0 = bn(a)
    x0 = relu(n0)
    b = conv(x0, 6, k=3)
    n1 = bn(b)
    c = conv(x0, 6)
    n2 = bn(c)
    n3 = bn(x0)
    s = add(n1, n2)
    t = add(s, n3)
    u = relu(t)
    out = conv(u, 4)
"""
PRE_ACTIVATION = """
    a = conv(x, 6)
    n1 = bn(a)
    r1 = relu(n1)
    b = conv(r1, 6, k=3)
    s1 = add(a, b)
    n2 = bn(s1)
    r2 = relu(n2)
    c = conv(r2, 6, k=3)
    s2 = add(s1, c)
    n3 = bn(s2)
    r3 = relu(n3)
    out = conv(r3, 4)
"""


def test_the_gradient_of_an_identity_batch_norm_is_added_by_a_convolution(training, rewritten, ops, golden):
    """RepVGG: x is read by two convolutions and a BN, and written by a sum whose BNs need its masked gradient."""
    result = rewritten(training(IDENTITY), "bnff")
    assert "BatchNormGradNormalizeReluConvGradAddGradientAddBatchNormGradReluGradReduce" in ops(result)
    assert not any(name.startswith("BatchNormGradPointwiseGrad") for name in ops(result))
    golden.check(result.model)


def test_an_identity_batch_norm_beside_one_convolution(training, rewritten, ops):
    model = training("""
        a = conv(x, 6)
        b = conv(a, 6, k=3)
        n1 = bn(b)
        n2 = bn(a)
        s = add(n1, n2)
        r = relu(s)
        out = conv(r, 4)
    """)
    result = rewritten(model, "bnff")
    assert "BatchNormGradConvGradAddBatchNormGrad" in ops(result)
    assert result.report.unfused == ()


def test_a_gradient_that_goes_past_the_relu_is_added_behind_the_mask(training, rewritten, ops):
    """Xception: y = x + f(relu(x)); the BN before reduces over the sum."""
    model = training("""
        a = conv(x, 6)
        n1 = bn(a)
        b = conv(x, 6)
        n2 = bn(b)
        s = add(n1, n2)
        r = relu(s)
        c = conv(r, 6, k=3)
        n3 = bn(c)
        t = add(n3, s)
        out = maxpool(t)
    """)
    result = rewritten(model, "bnff")
    assert "BatchNormGradReluConvGradReluGradAddSkipGradientReduceOtherReduceOther" in ops(result)
    assert (result.report.unfused, "Sum" in ops(result)) == ((), False)


def test_a_term_with_room_before_its_mask_takes_the_others_whatever_the_order(training, rewritten, ops):
    model = training("""
        a = conv(x, 6)
        n1 = bn(a)
        b = conv(x, 6)
        n2 = bn(b)
        s = add(n1, n2)
        r = relu(s)
        c = conv(r, 6, k=3)
        n3 = bn(c)
        d = conv(s, 6, k=3)
        n4 = bn(d)
        t = add(n3, n4)
        out = maxpool(t)
    """)
    result = rewritten(model, "bnff")
    assert "BatchNormGradConvGradAddGradientReduceOtherReduceOther" in ops(result)
    assert result.report.unfused == ()


def test_before_a_batch_norm_that_comes_first_the_sum_of_gradients_is_stored_once(training, rewritten, ops):
    """Pre-activation: a convolution and the skip further up read p*dz + q*x + w + other, as y + x is read in the
    forward pass. Where nothing has been added yet, both read the BN's dz and x instead."""
    result = rewritten(training(PRE_ACTIVATION), "bnff")
    assert ops(result).count("AddPointwiseStatistics") == 2
    sweeps = [name for name in ops(result) if name.startswith("BatchNormGradPointwiseGrad")]
    assert sweeps == ["BatchNormGradPointwiseGradAddBatchNormGrad", "BatchNormGradPointwiseGradAddGradient"]
    (first,) = result.report.unfused  # nothing but one convolution reads the last sum
    assert (first.node, first.half) == ("n1", "gradient input")
    assert first.reason.startswith("a_grad is a sum of gradients, and only ConvGradWeight 'a/grad' reads it")


def test_a_skip_has_the_steps_of_the_map_that_it_takes(training, rewritten, ops):
    """MobileNetV3, HRNet: the first map of a stage, normalised and activated, is the skip of its first block."""
    model = training("""
        a = conv(x, 6)
        n1 = bn(a)
        r = silu(n1)
        b = conv(r, 6, k=3)
        n2 = bn(b)
        s = add(n2, r)
        out = maxpool(s)
    """)
    result = rewritten(model, "bnff")
    assert "NormalizeSkipQuickGeluAddNormalizedPointwise" in ops(result)
    assert (result.report.unfused, "NormalizeQuickGeluPointwise" in ops(result)) == ((), False)


def test_two_skips_of_one_map_keep_apart_what_they_activate(training, rewritten, ops):
    model = training("""
        a = conv(x, 6)
        n1 = bn(a)
        r = relu(n1)
        b = conv(x, 6)
        n2 = bn(b)
        u = relu6(n2)
        s = add(r, u)
        out = maxpool(s)
    """)
    result = rewritten(model, "bnff")
    assert "NormalizeReluSkipClipAddNormalizedPointwise" in ops(result)


def test_the_activation_of_a_stored_sum_goes_into_what_reads_it(training, rewritten, ops, golden):
    """CSPResNet, ECA-ResNet: no Relu, so the mask needs the sum itself. Nothing stores the activated map beside it, and
    the mask and the reductions of the BN before find the sum in the convolution that writes the gradient."""
    model = training("""
        a = conv(x, 6)
        n1 = bn(a)
        s1 = add(n1, a)
        r1 = silu(s1)
        b = conv(r1, 6, k=3)
        n2 = bn(b)
        s2 = add(n2, r1)
        r2 = silu(s2)
        out = conv(r2, 4)
    """)
    result = rewritten(model, "bnff")
    assert {"QuickGeluAddNormalizedPointwise", "QuickGeluConv", "QuickGeluConvStatistics"} <= {*ops(result)}
    assert "BatchNormGradQuickGeluConvGradAddGradientQuickGeluGradReduceOther" in ops(result)
    assert {(entry.node, entry.half) for entry in result.report.unfused} == {("n1", "gradient input")}  # at the input
    golden.check(result.model)


def test_an_activated_sum_that_nothing_else_reads_is_stored_as_it_is_read(training, rewritten, ops):
    model = training("""
        a = conv(x, 6)
        b = conv(x, 6)
        s = add(a, b)
        r = relu(s)
        out = maxpool(r)
    """)
    assert "AddReluPointwise" in ops(rewritten(model, "bnff"))


ACTIVATED_RESIDUAL = """
    a = conv(x, 6)
    n0 = bn(a)
    s0 = relu6(n0)
    b = conv(s0, 6, k=3)
    n1 = bn(b)
    r1 = relu6(n1)
    s1 = add(r1, s0)
    c = conv(s1, 6, k=3)
    n2 = bn(c)
    r2 = relu6(n2)
    s2 = add(r2, s1)
    out = conv(s2, 4)
"""


def test_a_gradient_that_a_skip_reads_unmasked_is_masked_where_its_batch_norm_reads_it(
    training, rewritten, ops, golden
):
    """CSPDarknet: y = x + f(bn(..)). What writes the gradient of y sums the masked one, and stores it as it is."""
    result = rewritten(training(ACTIVATED_RESIDUAL), "bnff")
    assert {
        "ClipGradBatchNormGradConvGradAddGradientReduceClipGrad",
        "ConvGradReduceClipGrad",
        "ClipGradBatchNormGradNormalizeClipConvGradAddGradientClipGradReduce",
    } <= {*ops(result)}
    assert result.report.unfused == ()
    golden.check(result.model)


def test_a_masked_gradient_that_others_read_too_stays_a_sweep_and_says_why(training, rewritten):
    model = training(ACTIVATED_RESIDUAL)
    masked = next(node for node in model.graph if node.name == "r2/grad").outputs[0]
    model.graph.outputs.append(masked)
    result = rewritten(model, "bnff")
    refused = [entry.reason for report in result.report.passes if "shared" in report.name for entry in report.refused]
    assert f"{masked.name} is read by more than the input gradient of its BatchNorm" in refused
    assert ("n2", "gradient reductions") in {(entry.node, entry.half) for entry in result.report.unfused}


CONV_MIXER = """
    a = conv(x, 6, bias=1)
    r0 = relu(a)
    n0 = bn(r0)
    b = conv(n0, 6, k=3, g=6, bias=1)
    r1 = relu(b)
    n1 = bn(r1)
    s = add(n1, n0)
    c = conv(s, 6, bias=1)
    r2 = relu(c)
    n2 = bn(r2)
    out = conv(n2, 4)
"""


def test_the_activation_before_a_batch_norm_masks_its_input_gradient_where_it_is_read(training, rewritten, ops):
    """ConvMixer: a convolution, an activation, then the BN."""
    result = rewritten(training(CONV_MIXER), "bnff")
    assert {
        "BatchNormGradReluGradConvGradWeightBiasGrad",
        "BatchNormGradReluGradNormalizeConvGradBiasGradAddGradientReduce",
        "BatchNormGradReluGradNormalizeAddNormalizedConvGradBiasGradReduceOther",
    } <= {*ops(result)}
    assert result.report.unfused == ()


def test_an_activation_whose_result_does_not_tell_its_mask_is_read_as_it_was(training, rewritten, ops):
    result = rewritten(training(CONV_MIXER.replace("relu(", "silu(")), "bnff")
    assert "BatchNormGradQuickGeluGradNormalizeAddNormalizedConvGradBiasGradReduceOther" in ops(result)
    assert result.report.unfused == ()


RES2NET = """
    a = conv(x, 8)
    n0 = bn(a)
    r0 = relu(n0)
    p0, p1, p2, p3 = cut(r0, 2, 2, 2, 2)
    b = conv(p0, 2, k=3)
    n1 = bn(b)
    r1 = relu(n1)
    s1 = add(r1, p1)
    c = conv(s1, 2, k=3)
    n2 = bn(c)
    r2 = relu(n2)
    s2 = add(r2, p2)
    d = conv(s2, 2, k=3)
    n3 = bn(d)
    r3 = relu(n3)
    t = cat(r1, r2, r3, p3)
    e = conv(t, 8)
    n4 = bn(e)
    out = relu(n4)
"""


def test_a_sum_of_two_gradients_that_others_read_is_made_where_it_is_read(training, rewritten, ops):
    """Res2Net: the gradient of r2 is a piece of t's and all of s2's, which p2 needs unmasked."""
    result = rewritten(training(RES2NET))
    assert {
        "AddGradReluGradBatchNormGradConvGradReduceAddedReluGradReduceReluGrad",
        "BatchNormGradConvGradReduceAddedReluGradReduceReluGrad",
        "AddGradReluGradBatchNormGradNormalizeReluConvGradReluGradReduce",
    } <= {*ops(result)}
    assert (result.report.unfused, "Sum" in ops(result)) == ((), False)


def test_the_pieces_of_a_gradient_are_masked_where_their_whole_is_read(training, rewritten, ops, golden):
    """The gradients of p1 and p2 lie in that of r0 unmasked, those of p0 and p3 masked: n0 masks all."""
    result = rewritten(training(RES2NET))
    assert "ReluGradBatchNormGradConvGradWeight" in ops(result)
    golden.check(result.model)


def test_pieces_stay_masked_where_a_mask_twice_is_not_one(training, rewritten):
    result = rewritten(training(RES2NET.replace("relu(", "silu(")))
    assert {(entry.node, entry.half) for entry in result.report.unfused} == {("n0", "gradient reductions")}


def test_a_piece_that_is_not_masked_keeps_the_others_so(training, rewritten):
    model = training(RES2NET.replace("p0, p1, p2, p3 = cut(r0, 2, 2, 2, 2)", "p0, p1, p2, p3 = cut(n0, 2, 2, 2, 2)"))
    rewritten(model)


BODIES = {
    "identity": IDENTITY,
    "pre-activation": PRE_ACTIVATION,
    "activated residual": ACTIVATED_RESIDUAL,
    "activation first": CONV_MIXER,
    "pieces": RES2NET,
}


@pytest.mark.parametrize("name", BODIES)
def test_a_step_gives_the_gradients_of_the_file(name, training, ort):
    model = training(BODIES[name])
    proto = ir.to_proto(model)
    step = bnfuse.compile(bnfuse.rewrite(proto).model, target="cpu")
    values = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    images = np.random.default_rng(3).standard_normal((2, 3, 8, 8)).astype(np.float32)
    labels = np.array([1, 3])
    loss = step.forward(images, labels)
    step.backward()
    wanted = ort(model, {"x": images, "labels": labels})
    assert loss == pytest.approx(float(wanted["loss"]), rel=1e-5)
    found = step.gradients()
    assert {*found} == {name.removesuffix("_grad") for name in wanted if name.endswith("_grad")} & {*values}
    floor = 1e-3 * max(float(np.linalg.norm(wanted[f"{name}_grad"])) for name in found)
    for name, gradient in found.items():
        error = np.linalg.norm(gradient - wanted[f"{name}_grad"]) / (np.linalg.norm(wanted[f"{name}_grad"]) + floor)
        assert error < 1e-4, f"{name} is off by {error:.1e}"


SKIPS = """
    a = conv(x, 6)
    n0 = bn(a)
    s0 = silu(n0)
    b = conv(s0, 6, k=3)
    n1 = bn(b)
    s1 = add(n1, s0)
    r1 = silu(s1)
    c = conv(r1, 6, k=3)
    n2 = bn(c)
    s2 = add(n2, r1)
    out = conv(s2, 4)
"""


@pytest.mark.parametrize("name", [*BODIES, "skips"])
def test_what_is_exported_of_it_is_what_is_exported_of_the_file(name, training, tmp_path):
    proto = ir.to_proto(training({**BODIES, "skips": SKIPS}[name]))
    images, logits = np.random.default_rng(5).standard_normal((2, 3, 8, 8)).astype(np.float32), []
    for model in (proto, bnfuse.rewrite(proto).model):
        bnfuse.export_inference(model, tmp_path / "exported.onnx")
        exported = onnx.load(tmp_path / "exported.onnx")
        assert not any(node.domain for node in exported.graph.node)
        session = ort.InferenceSession(exported.SerializeToString(), providers=["CPUExecutionProvider"])
        logits.append(session.run(None, {session.get_inputs()[0].name: images})[0])
    np.testing.assert_allclose(logits[1], logits[0], rtol=1e-4, atol=1e-5)
