"""Schemas: what onnx's checker and shape inference know of our operators and of training graphs."""

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from bnfuse.build import build_training_graph
from bnfuse.core.errors import BnfuseError
from bnfuse.opset import schemas
from bnfuse.opset.plain import PLAIN_OPS
from bnfuse.opset.shapes import result_shapes
from bnfuse.opset.spec import DOMAIN, parse
from bnfuse.opset.training_ops import TRAINING_OPS, dims_of

NAMES = (
    "NormalizeReluConvBiasStoreInputStatistics",
    "AddMaxPoolStatistics",
    "AveragePool",
    "GlobalAveragePoolStatistics",
    "SliceBatchNormGradNormalizeReluConvGradBiasGradReluGradReduceReduceOtherAccumulate",
    "ConvGradWeight",
    "MaxPoolGradReluGradReduce",
    "AveragePoolGradScale",
    "GlobalAveragePoolGrad",
    "SlicePointwiseGrad",
    "SlicePointwiseGradReduceOtherAccumulate",
    "NormalizePointwiseGradClipGrad",
    *PLAIN_OPS,
)


def inferred_shapes(model: onnx.ModelProto) -> dict[str, tuple | None]:
    graph = schemas.infer_shapes(model).graph
    return {value.name: dims_of(value.type) for value in (*graph.input, *graph.value_info, *graph.output)}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("function", [False, True])
def test_shapes_of_results_are_inferred(name, function, case):
    it = case(name)
    model = it.model(function=function)
    expected = {name: value.shape for name, value in it.expected().items()}
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
    shapes = inferred_shapes(model)
    assert {name: shapes[name] for name in expected} == expected


@pytest.mark.parametrize("name", NAMES)
def test_model_with_functions_passes_the_full_check(name, case):
    schemas.check_model(case(name).model())


def test_unknown_dimensions_stay_unknown():
    op = parse("ReluConvStatistics")
    window = {"kernel_shape": [3, 3], "pads": [0] * 4, "strides": [1, 1], "dilations": [1, 1], "group": 1}
    known = result_shapes(op, {"x": ("N", 4, None, 8), "weight": (6, 4, 3, 3)}, window)
    assert known == {"y": ("N", 6, None, None), "mean": (6,), "variance": (6,)}
    assert result_shapes(op, {"x": None, "weight": None}, window) == {"y": None, "mean": (None,), "variance": (None,)}


def test_missing_attribute_is_named_in_one_line(case):
    model = case("MaxPool").model()
    kept = [attribute for attribute in model.graph.node[0].attribute if attribute.name != "strides"]
    del model.graph.node[0].attribute[:]
    model.graph.node[0].attribute.extend(kept)
    with pytest.raises(BnfuseError, match="strides") as raised:
        schemas.check_model(model)
    assert "\n" not in str(raised.value)


def test_registering_twice_is_harmless():
    for _ in range(2):
        schemas.register(["NormalizeReluConv", "BatchNormFinalize"])
        schemas.register_training_ops()
    assert onnx.defs.has("NormalizeReluConv", DOMAIN)
    assert onnx.defs.get_schema("ConvGrad", 1, "com.microsoft").max_output == 3


def test_unknown_operator_is_refused():
    with pytest.raises(BnfuseError, match=r"ai\.bnfuse::ReluNormalizeConv"):
        schemas.register(["ReluNormalizeConv"])


# Training graphs


def forward_model(body: str, opset: int = 17) -> onnx.ModelProto:
    """x [2, 3, 12, 12] -> h [2, 4, 12, 12] by a convolution -> body makes r -> logits."""
    model = onnx.parser.parse_model(f"""
        <ir_version: 9, opset_import: ["": {opset}]>
        g (float[2,3,12,12] x) => (float[2,K] logits) {{
            h = Conv <kernel_shape = [3,3], pads = [1,1,1,1]> (x, w)
            {body}
            logits = Flatten <axis = 1> (r)
        }}""")
    values = {"w": np.full((4, 3, 3, 3), 0.1), "w4": np.full((4, 4, 1, 1), 0.1), "bias": np.ones(4)}
    values |= {"scale": np.ones(4), "mean": np.zeros(4), "variance": np.ones(4), "m": np.ones((12, 5))}
    read = {name for node in model.graph.node for name in node.input}
    model.graph.initializer.extend(
        numpy_helper.from_array(value.astype(np.float32), name) for name, value in values.items() if name in read
    )
    return model


POOL = "<kernel_shape = [3,3], strides = [2,2], pads = [1,1,1,1]>"
FORWARD = {
    "bn and relu": """b, rm, rv = BatchNormalization <training_mode = 1> (h, scale, bias, mean, variance)
        r = Relu(b)""",
    "max pool": f"r = MaxPool {POOL} (h)",
    "average pools of one kind": f"""p = AveragePool {POOL} (h)
        q = Sigmoid(p)
        r = AveragePool {POOL} (q)""",
    "global pool": "r = GlobalAveragePool(h)",
    "concat": """s = Relu(h)
        t = Tanh(h)
        r = Concat <axis = 1> (s, t, h)""",
    "convolution with bias": "r = Conv(h, w4, bias)",
    "silu": "s = Sigmoid(h) r = Mul(h, s)",
    "leaky relu": "r = LeakyRelu(h)",
    "clip": "low = Constant <value_float = 0.0> () high = Constant <value_float = 6.0> () r = Clip(h, low, high)",
    "softmax": "r = Softmax <axis = 1> (h)",
    "log softmax": "r = LogSoftmax <axis = 1> (h)",
    "dropout": """ratio = Constant <value_float = 0.5> () on = Constant <value = bool {1}> ()
        r, kept = Dropout(h, ratio, on)""",
    "slice": """from = Constant <value_ints = [1]> () to = Constant <value_ints = [3]> ()
        r = Slice(h, from, to, from)""",
    "gather": "at = Constant <value_ints = [1, 0]> () r = Gather <axis = 1> (h, at)",
    "division": "e = Exp(h) r = Div(h, e)",
    "matrix product": "r = MatMul(h, m)",
    "squeeze and excitation": "p = GlobalAveragePool(h) q = Conv(p, w4) s = Sigmoid(q) r = Mul(h, s)",
}


@pytest.fixture(scope="module", params=FORWARD.values(), ids=FORWARD)
def training_graph(request) -> onnx.ModelProto:
    return build_training_graph(forward_model(request.param))


def test_training_graph_passes_the_full_check(training_graph):
    schemas.check_model(training_graph)


def test_every_shape_of_a_training_graph_is_found_again(training_graph):
    expected = {value.name: dims_of(value.type) for value in training_graph.graph.value_info}
    bare = onnx.ModelProto()
    bare.CopyFrom(training_graph)
    del bare.graph.value_info[:]
    shapes = inferred_shapes(bare)
    assert [n for node in bare.graph.node for n in node.output if n and shapes.get(n) is None] == []
    assert {name: shapes[name] for name in expected} == expected


def test_initial_values_are_kept(training_graph):
    assert schemas.infer_shapes(training_graph).graph.initializer == training_graph.graph.initializer


def test_shapes_that_do_not_fit_are_one_line():
    model = build_training_graph(forward_model(FORWARD["bn and relu"]))
    next(value for value in model.graph.value_info if value.name == "h").type.tensor_type.shape.dim[1].dim_value = 5
    with pytest.raises(BnfuseError, match="shapes do not fit together") as raised:
        schemas.infer_shapes(model)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("op", TRAINING_OPS, ids=lambda op: op.name)
def test_every_training_operator_has_a_schema_with_inference(op):
    schemas.register_training_ops()
    schema = onnx.defs.get_schema(op.name, 17 if op.domain == "" else 1, op.domain)
    assert schema.has_type_and_shape_inference_function
    assert len(schema.inputs) == len(op.inputs.split())
