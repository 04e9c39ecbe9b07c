"""Which standard operators have a gradient: all, but for those that are listed here with the reason."""

from __future__ import annotations

import re
from pathlib import Path

import onnx
import pytest

from bnfuse import autodiff
from bnfuse.autodiff import differentiable
from bnfuse.autodiff.rules import FLAT, rule, rules
from bnfuse.build.decompose import DECOMPOSITIONS
from bnfuse.opset.traffic import SHAPE_READERS
from bnfuse.opset.training_ops import TRAINING_OPS
from bnfuse.runtime.lowering.generic import supported

# control flow, sequences, maps, texts and optional values: a graph that is trained has none
OTHER_VALUES = {
    *("If", "Loop", "Scan", "SequenceMap"),
    *("ConcatFromSequence", "SequenceAt", "SequenceConstruct", "SequenceEmpty", "SequenceErase", "SequenceInsert"),
    *("SequenceLength", "SplitToSequence", "Optional", "OptionalGetElement", "OptionalHasElement"),
    *("RegexFullMatch", "StringConcat", "StringNormalizer", "StringSplit", "TfIdfVectorizer", "ImageDecoder"),
}
# numbers of few bits: what is trained is not quantized
QUANTIZED = {
    *("ConvInteger", "DequantizeLinear", "DynamicQuantizeLinear", "MatMulInteger", "QLinearConv", "QLinearMatMul"),
    *("QuantizeLinear", "BitCast"),
}
# signals, boxes and their like, in no network that is trained here
LEFT_OUT = {
    *(
        "Compress",
        "DFT",
        "Det",
        "MaxRoiPool",
        "MaxUnpool",
        "MelWeightMatrix",
    ),
    *("NonMaxSuppression", "RoiAlign", "STFT", "TensorScatter", "Unique"),
}


def standard() -> set[str]:
    """List onnx's operators, without those of onnxruntime that may have been registered beside them."""
    added = {op.name for op in TRAINING_OPS if not op.domain}
    known = (each for each in onnx.defs.get_all_schemas() if not each.domain and not each.deprecated)
    return {schema.name for schema in known} - added


def test_every_standard_operator_is_differentiable_or_written_by_others_or_listed():
    known = {*differentiable(), *DECOMPOSITIONS}
    assert sorted(standard() - known) == sorted((OTHER_VALUES | QUANTIZED | LEFT_OUT) & standard())


def test_no_operator_of_the_lists_has_a_gradient():
    assert sorted((OTHER_VALUES | QUANTIZED | LEFT_OUT) & {*differentiable(), *DECOMPOSITIONS}) == []


def test_rules_are_of_operators_that_there_are():
    assert sorted({*differentiable()} - standard()) == []


def test_what_is_flat_has_no_rule():
    assert sorted(FLAT & {*rules()}) == []


def test_a_second_rule_of_an_operator_is_an_error():
    with pytest.raises(AssertionError, match="Add has two rules"):
        rule("Add")(rules()["Add"])


def test_what_rules_emit_has_kernels():
    source = "".join(path.read_text(encoding="utf-8") for path in Path(autodiff.__file__).parent.glob("*.py"))
    emitted = {*re.findall(r'\.ops?\(\s*"(\w+)"', source)}
    assert len(emitted) > 40
    assert sorted(emitted - {*supported(), *SHAPE_READERS}) == []  # what follows from shapes is known before
