"""The Python API takes a model in every form and leaves it as it was."""

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import onnx_ir as ir
import pytest

import bnfuse
from bnfuse import api
from bnfuse.build.named import build_model
from bnfuse.core.errors import BnfuseError
from bnfuse.runtime.program.optim import SGD, AdamW


@pytest.fixture(scope="module")
def proto():
    return build_model("densenet40", zoo={"batch": 2, "image": 8, "growth": 4, "depth": 2}).model


def test_every_form_of_a_model_gives_the_same_result(proto, tmp_path):
    path = tmp_path / "train.onnx"
    onnx.save(proto, path)
    forms = [path, str(path), proto, ir.from_proto(proto), bnfuse.load(path)]
    counts = {str(bnfuse.diff(form, bnfuse.rewrite(form)).ops_after) for form in forms}
    assert len(counts) == 1


def test_a_graphsurgeon_graph_is_a_model_too(proto):
    graph = gs.import_onnx(proto)
    assert bnfuse.verify(graph, bnfuse.rewrite(graph, level="icf")).equal


def test_rewriting_leaves_its_source_as_it_was(proto):
    model = bnfuse.load(proto)
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    bnfuse.rewrite(model, level="icf")
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before


def test_a_saved_rewrite_is_valid_and_loads_as_the_same_graph(proto, tmp_path):
    rewritten = bnfuse.rewrite(proto, level="icf")
    bnfuse.save(rewritten.model, tmp_path / "fused.onnx")
    assert bnfuse.diff(rewritten, tmp_path / "fused.onnx").equal


def test_rewriting_twice_changes_nothing(proto):
    once = bnfuse.rewrite(proto, level="icf")
    assert bnfuse.diff(once, bnfuse.rewrite(once, level="icf")).equal


def test_an_unknown_level_is_refused_with_those_there_are(proto):
    with pytest.raises(BnfuseError, match="none, rcf, mvf, bnff, icf"):
        bnfuse.rewrite(proto, level="all")


def test_what_is_no_model_is_refused():
    with pytest.raises(BnfuseError, match="cannot load a int"):
        bnfuse.load(3)


def test_an_attribute_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'fuse'"):
        bnfuse.fuse  # noqa: B018


def test_optimisers_by_name():
    assert api.optimizer("sgd", 0.1, 0.9, True, 1e-4, ["*.bias"]) == SGD(0.1, 0.9, True, 1e-4, ("*.bias",))
    assert api.optimizer("adamw", 0.001, weight_decay=0.1) == AdamW(0.001, weight_decay=0.1)
    with pytest.raises(BnfuseError, match="it is one of sgd, adamw, adam, rmsprop, rmsproptf, lion"):
        api.optimizer("lamb", 0.1)


def test_the_version_is_that_of_the_distribution():
    from importlib.metadata import version

    assert bnfuse.__version__ == version("bnfuse")


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: SGD(lr="0.1"), "SGD: lr='0.1'"),
        (lambda: SGD(lr=0.1, momentum=None), "SGD: momentum=None"),
        (lambda: SGD(lr=True), "SGD: lr=True"),
        (lambda: SGD(lr=float("nan")), "SGD: lr=nan"),
        (lambda: AdamW(lr=0.1, betas=("a", 0.9)), "AdamW: betas"),
    ],
)
def test_an_optimisers_rates_are_numbers(make, field):
    with pytest.raises(BnfuseError, match=field):
        make()


def test_an_optimisers_rates_may_be_numpys():
    assert SGD(lr=np.float32(0.5), momentum=np.float64(0.5)).lr == 0.5
