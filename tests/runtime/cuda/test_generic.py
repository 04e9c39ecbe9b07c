"""Generic operators on a GPU, interpreted: all that is asked of the CPU's, and what a GPU has besides."""

import pathlib

import numpy as np
import pytest
import source_files
from cuda_kernels import ARCHITECTURES, assert_no_spills, gpu, run_kernel

from bnfuse.runtime.backends.cpu import execute
from bnfuse.runtime.kernels.common.generic import GenericProblem
from bnfuse.runtime.kernels.cpu import generic as cpu
from bnfuse.runtime.kernels.cuda.generic import generic

on_cpu = source_files.load(pathlib.Path(__file__).parents[1] / "test_generic.py")
values = on_cpu.values


def run(op, inputs, outputs, attributes=None, scalars=()):
    """Outputs of these shapes and dtypes, by the GPU's kernel."""
    inputs = [np.asarray(a) for a in inputs]
    kinds = [tuple((tuple(a.shape), a.dtype.name) for a in arrays) for arrays in (inputs, outputs)]
    kernel = generic(GenericProblem(op, *kinds, tuple((attributes or {}).items())), gpu(multiprocessors=1))
    named = dict(zip((name for name, _ in kernel.scalars), scalars, strict=True))
    found = run_kernel(kernel, {f"in{i}": a for i, a in enumerate(inputs)}, scalars=named)
    return [found[f"out{i}"].reshape(a.shape) for i, a in enumerate(outputs)]


indexing = source_files.load(pathlib.Path(__file__).parents[1] / "test_generic_indexing.py")
on_cpu.run, on_cpu.generic, indexing.base.run = run, generic, run
for module in (on_cpu, indexing):
    globals().update({name: test for name, test in vars(module).items() if name.startswith("test_")})


def test_dropout_draws_the_mask_that_a_cpu_draws():
    x = values(60, 33)
    kinds = ((x.shape, "float32"),), ((x.shape, "float32"), (x.shape, "bool"))
    problem = GenericProblem("Dropout", *kinds, (("ratio", 0.25), ("node", 7)))
    seed, step = 3, 2**33 + 5
    wanted = execute.call(cpu.generic(problem, on_cpu.TARGET), {"in0": x}, scalars=(seed, step))
    found = run_kernel(generic(problem, gpu()), {"in0": x}, scalars={"seed": seed, "step": step})
    for name in ("out0", "out1"):
        np.testing.assert_array_equal(found[name], wanted[name])


LARGE = [((7, 20000), (1,)), ((3000, 7), (0,)), ((40000,), (0,)), ((5, 3, 9000), (0, 2)), ((90, 4, 50), (0, 1))]


@pytest.mark.parametrize(("shape", "axes"), LARGE)
def test_large_reductions_in_shares(shape, axes):
    x = values(*shape)
    y = x.astype(np.float64).sum(axes)
    problem = GenericProblem(
        "ReduceSum", ((shape, "float32"),), ((y.shape, "float32"),), (("axes", axes), ("keepdims", 0))
    )
    kernel = generic(problem, gpu(multiprocessors=8))
    assert len(kernel.build()) == 2
    np.testing.assert_allclose(run_kernel(kernel, {"in0": x})["out0"], y.ravel(), rtol=1e-6, atol=1e-3)


def test_tensors_without_elements():
    empty = np.empty((0, 4), np.float32)
    assert run("Relu", [empty], [empty])[0].shape == (0, 4)
    assert run("Concat", [empty, values(2, 4)], [values(2, 4)], {"axis": 0})[0].shape == (2, 4)

    data, none = values(4, 5), np.empty((0, 2), np.int64)
    assert (run("ScatterND", [data, none, np.empty(0, np.float32)], [data])[0] == data).all()
    assert (run("ScatterElements", [data, none, np.empty((0, 2), np.float32)], [data], {"axis": 0})[0] == data).all()


KINDS = [
    ("Erf", ["float32"], "float32"),
    ("Mish", ["float32"], "float32"),
    ("Pow", ["float32", "float32"], "float32"),
    ("Div", ["int64", "int64"], "int64"),
    ("Where", ["bool", "float32", "float32"], "float32"),
    ("Greater", ["int32", "int32"], "bool"),
    ("ReduceSum", ["float32"], "float32"),
    ("Softmax", ["float32"], "float32"),
    ("Dropout", ["float32"], "float32"),
    ("Transpose", ["float32"], "float32"),
    ("Acosh", ["float32"], "float32"),
    ("Round", ["float32"], "float32"),
    ("Mod", ["float32", "float32"], "float32"),
    ("CumSum", ["float32"], "float32"),
    ("ArgMax", ["float32"], "int64"),
    ("ArgMax", ["int64"], "int64"),
    ("ReduceLogSumExp", ["float32"], "float32"),
    ("ScatterElements", ["float32", "int64", "float32"], "float32"),
    ("GatherElements", ["float32", "int64"], "float32"),
    ("TopK", ["float32"], "float32"),
]


def test_compiles_without_spills():
    """For the architectures by turns."""
    for i, (op, inputs, output) in enumerate(KINDS):
        shape = (30, 1, 70) if op.startswith(("Reduce", "Arg")) else (70, 50, 30) if op == "Transpose" else (30, 50, 70)
        attributes = (("axes", (1,)),) if op.startswith("Reduce") else (("axis", 1),) if op == "ArgMax" else ()
        problem = GenericProblem(op, tuple(((30, 50, 70), kind) for kind in inputs), ((shape, output),), attributes)
        assert_no_spills(generic(problem, gpu(arch=ARCHITECTURES[i % 2])))
