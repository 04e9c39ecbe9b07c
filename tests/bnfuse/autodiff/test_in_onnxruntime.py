"""Gradients are standard ONNX: plain onnxruntime runs the graph of every rule, in float32."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from differentiated import close
from gradient_cases import CASES, with_gradient

from bnfuse.autodiff.rules import rules
from bnfuse.opset.functions import add_functions
from bnfuse.opset.sources import SOURCES


@pytest.mark.parametrize("name", CASES)
def test_onnxruntime_runs_the_gradient(name):
    found = with_gradient(name)
    model = found.model.clone()
    add_functions(model)
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    given = {value.name: found.values[value.name] for value in session.get_inputs()}
    for output, value in zip(session.get_outputs(), session.run(None, given), strict=True):
        close(value, found.values[output.name], 2e-5, output.name)


def test_every_rule_has_a_case():
    """Activations have theirs in test_activations.py."""
    activations = {name for domain, name in SOURCES if not domain}
    assert sorted({*rules()} - {*CASES} - activations) == []
