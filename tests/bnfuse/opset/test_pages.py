"""docs/ops.md says what the grammar says."""

from pathlib import Path

import bnfuse.opset
from bnfuse.opset import pages
from bnfuse.opset.activations import ACTIVATIONS
from bnfuse.opset.plain import PLAIN_OPS
from bnfuse.opset.spec import (
    ACTIVATION_GRADS,
    BACKWARD_CORES,
    EPILOGUE_OPERANDS,
    EPILOGUE_RESULTS,
    FORWARD_CORES,
    IMAGE_GATES,
    PLUS,
    PROLOGUE_OPERANDS,
)

PAGE = Path(__file__).parents[3] / "docs" / "ops.md"


def test_page_is_up_to_date():
    assert PAGE.read_text() == pages.render(), "run: python -m bnfuse.opset.pages > docs/ops.md"


def test_every_step_core_and_operator_has_a_text():
    assert {*pages.CORES} == {*FORWARD_CORES, *BACKWARD_CORES}
    assert {name for texts in pages.PLAIN_SECTIONS.values() for name in texts} == {*PLAIN_OPS}
    assert {*pages.PROLOGUE} == {*PROLOGUE_OPERANDS, *ACTIVATIONS, *PLUS, "Slice", "SkipActivation"}
    shared = {"Relu", "ReduceOther", "ReduceGated", "Part", pages.MASKED, pages.IMAGE_GATE}
    assert {*pages.EPILOGUE} == {*EPILOGUE_OPERANDS, *EPILOGUE_RESULTS, *ACTIVATION_GRADS, *shared} - {*IMAGE_GATES}


def test_attributes_of_steps():
    assert pages.step_attributes("Accumulate") == ("acc_start", "acc_stop")
    assert pages.step_attributes("Slice") == ("grad_start", "grad_stop")
    assert pages.step_attributes("ClipGrad") == ACTIVATIONS["Clip"].attributes
    assert pages.step_attributes("Normalize") == ()


def test_package_exports_what_it_lists():
    assert all(hasattr(bnfuse.opset, name) for name in bnfuse.opset.__all__)
