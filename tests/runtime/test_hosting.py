"""A step as a part of somebody's framework, on a CPU: views, statistics after forward, backward in pieces."""

from __future__ import annotations

import dataclasses
import pathlib
import threading
from collections.abc import Callable, Sequence

import numpy as np
import onnx
import pytest
from source_files import load

from bnfuse.build import build_training_graph
from bnfuse.core.errors import BnfuseError
from bnfuse.graph.training_graph import open_graph
from bnfuse.passes import rewrite
from bnfuse.runtime import SGD, Step, add_batch, compile_step
from bnfuse.runtime.program import program as p

nets = load(pathlib.Path(__file__).parent / "test_session.py")


def without_loss(net: Callable[[], onnx.ModelProto] = nets.dense_net, batches: Sequence[int] = ()) -> Step:
    model = rewrite(open_graph(build_training_graph(net(), loss="none")).model, level="icf")
    return compile_step(model, threads=1, batches=batches)


def tiny_net() -> onnx.ModelProto:
    net = nets.Net()
    return net.model(net.op("Relu", net.bn(net.conv("image", 3, 8, 1), 8)), 8)


@pytest.fixture(scope="module")
def hosted() -> Step:
    return without_loss()


@pytest.fixture(scope="module")
def trained() -> Step:
    return compile_step(nets.graph_of(nets.dense_net, "icf"), threads=1, optimizer=SGD(0.1, momentum=0.9))


@pytest.fixture
def step(hosted):
    state = hosted.state_dict()
    yield hosted
    hosted.load_state_dict(state)


@pytest.fixture
def other(trained):
    state = trained.state_dict()
    yield trained
    trained.load_state_dict(state)
    trained.reset_optimizer()


def images(seed: int = 0) -> np.ndarray:
    return nets.batch(seed)[0]


def output_gradient(step: Step, seed: int = 7) -> np.ndarray:
    (name,) = step.program.signature["output_gradients"].values()
    return np.random.default_rng(seed).standard_normal(step.program.inputs[name].shape).astype(np.float32)


def wanted(step: Step, seed: int = 0) -> dict[str, np.ndarray]:
    """Gradients by the calls that were there before."""
    step.forward(images(seed))
    step.backward(output_gradient(step))
    return step.gradients()


# -- views ---------------------------------------------------------------------------------------------------------


def test_views_of_the_state_are_the_state(step):
    views = step.state_views()
    state = step.state_dict()
    assert views.keys() == state.keys()
    for name, view in views.items():
        np.testing.assert_array_equal(view, state[name])
        assert view.flags.writeable and view.flags.c_contiguous and view.dtype == np.float32
        view *= 2
        np.testing.assert_array_equal(step.state_dict()[name], 2 * state[name])
    step.load_state_dict(state)
    for name, view in views.items():
        np.testing.assert_array_equal(view, state[name])


def test_what_is_written_there_is_computed_with(step):
    before = step.forward(images())
    views = step.state_views()
    head = next(name for name, view in views.items() if view.shape == before.shape[1:])
    views[head] += 3
    np.testing.assert_allclose(step.forward(images()), before + 3, rtol=1e-5, atol=1e-5)


def test_one_copy_takes_all_gradients(step):
    expected = wanted(step)
    gradients = step.gradient_views()
    copied = gradients.of(gradients.flat.copy())
    assert copied.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(copied[name], value)
        np.testing.assert_array_equal(gradients.of(gradients.flat)[name], value)
    assert np.shares_memory(gradients.of(gradients.flat)[name], gradients.flat)
    inside = np.zeros(gradients.flat.size, bool)
    for part in gradients.slices.values():
        assert not inside[part].any()
        inside[part] = True
    assert not gradients.flat[~inside].any() and (~inside).sum() < 16 * len(expected)


def test_gradients_lie_elsewhere_from_when_it_is_said_so(step):
    expected, first = wanted(step), step.gradient_views()
    kept, place = first.flat.copy(), step.another_gradients()
    step.gradients_to(place)
    other = step.gradient_views()
    assert not np.shares_memory(first.flat, other.flat)
    other.flat[:] = np.nan  # whoever was given them may write there
    ticket = step.run_forward(images())
    pieces = step.pieces(2)
    step.backward_piece(pieces[0], output_gradient(step), ticket=ticket)
    with pytest.raises(BnfuseError, match="between two pieces"):
        step.gradients_to(place)
    step.backward_piece(pieces[1], ticket=ticket)
    for name, value in expected.items():
        np.testing.assert_array_equal(other.of(other.flat)[name], value)
        np.testing.assert_array_equal(step.gradients()[name], value)
    np.testing.assert_array_equal(first.flat, kept)


def test_another_batch_size_does_not_write_to_further_memory_for_gradients():
    made = without_loss(tiny_net)
    made.gradients_to(made.another_gradients())
    ours = made.gradient_views().flat
    ours[:] = 5
    add_batch(made, 3)
    found = made.forward(images()[:3])
    made.backward(np.ones_like(found))
    assert (ours == 5).all() and made.gradient_views().flat.any()


def test_further_memory_for_gradients_is_of_one_batch_size_and_has_what_is_constant():
    made = without_loss(tiny_net, (4, 2))
    made.run_forward(images()[:2])
    place = made.another_gradients()
    made.run_forward(images())
    with pytest.raises(BnfuseError, match="of another batch size"):
        made.gradients_to(place)
    own, program = made.another_gradients(), made.program
    held = program.storages[next(iter(program.gradients.values())).storage]
    index = next(i for i, one in enumerate(program.storages) if one is held)
    program.initial[index] = np.full(held.elements, 3, np.float32)  # as of a parameter whose gradient is a constant
    try:
        made.gradients_to(own)
        assert (made.gradient_views().flat[held.offset // 4 : held.offset // 4 + held.elements] == 3).all()
    finally:
        del program.initial[index]


def test_outputs_are_read_where_they_lie(step):
    logits = step.forward(images(1))
    (name,) = step.program.signature["output_gradients"]
    step.run_forward(images(1))
    view = step.output_views()[name]
    np.testing.assert_array_equal(view, logits)
    step.run_forward(images(2))
    assert not np.array_equal(view, logits)  # the next call writes over it


def test_views_hold_for_all_batch_sizes_and_outlive_the_step():
    made = without_loss(tiny_net, (4, 2))
    views = made.state_views()
    made.run_forward(images()[:2], commit_statistics=True)
    for name, value in made.state_dict().items():
        np.testing.assert_array_equal(views[name], value)
    gradients = made.gradient_views()
    made.backward(np.ones_like(output_gradient(made)[:2]))
    (kept,) = {name: value for name, value in gradients.of(gradients.flat).items() if value.shape == (5,)}.values()
    np.testing.assert_allclose(kept, 2, rtol=1e-6)  # of the bias of the head: a sum over two samples
    del made
    assert np.isfinite(next(iter(views.values()))).all()


# -- statistics ----------------------------------------------------------------------------------------------------


def test_statistics_are_committed_behind_forward_and_backward_is_the_same(step):
    expected = wanted(step)
    before = step.state_dict()
    new = {name: step.outputs[output] for name, output in step.program.signature["running"].items()}
    step.run_forward(images(), commit_statistics=True)
    for name, value in step.state_dict().items():
        np.testing.assert_array_equal(value, new.get(name, before[name]))
        assert name not in new or not np.array_equal(value, before[name])
    step.backward(output_gradient(step))
    for name, value in step.gradients().items():
        np.testing.assert_array_equal(value, expected[name])
    step.commit_statistics()  # once more: the same
    for name, value in new.items():
        np.testing.assert_array_equal(step.state_dict()[name], value)


def test_an_update_behind_it_does_what_it_does_alone(other):
    before = other.state_dict()
    other(*nets.batch(3))
    expected = other.state_dict()
    other.load_state_dict(before), other.reset_optimizer()
    (
        other.forward(*nets.batch(3)),
        other.commit_statistics(),
        other.backward(),
        other.commit_statistics(),
        other.update(),
    )
    for name, value in other.state_dict().items():
        np.testing.assert_array_equal(value, expected[name])


def test_statistics_need_a_forward(other):
    other(*nets.batch())
    with pytest.raises(BnfuseError, match="commit_statistics needs a forward"):
        other.commit_statistics()
    other.forward(*nets.batch())
    other.evaluate(images())
    with pytest.raises(BnfuseError, match="commit_statistics needs a forward"):
        other.commit_statistics()


def test_a_backward_that_reads_old_statistics_keeps_them():
    made = without_loss(tiny_net, (4, 2))
    program = made.program
    name, tensor = next(iter(program.running.items()))
    index = next(i for i, launch in enumerate(program.launches) if launch.phase == "backward")
    launch = program.launches[index]
    reads = dataclasses.replace(launch, arguments=(*launch.arguments, p.Buffer(tensor.storage, "in")))
    program.launches[index] = reads
    before = made.state_dict()
    with pytest.raises(BnfuseError, match=f"reads the running statistic '{name}' as it was before forward"):
        made.run_forward(images(), commit_statistics=True)
    for key, value in made.state_dict().items():
        np.testing.assert_array_equal(value, before[key])


# -- pieces --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_gradients_are_final_behind_their_piece(step, count):
    expected = wanted(step)
    gradients = step.gradient_views()
    gradients.flat[:] = np.nan
    ticket = step.run_forward(images())
    pieces = step.pieces(count)
    assert len(pieces) == pieces[0].count <= count and sorted(n for x in pieces for n in x.parameters) == sorted(
        expected
    )
    done: set[str] = set()
    for piece in pieces:
        step.backward_piece(piece, *([] if piece.index else [output_gradient(step)]), ticket=ticket)
        done.update(piece.parameters)
        found = gradients.of(gradients.flat)
        for name in done:
            np.testing.assert_array_equal(found[name], expected[name])
    assert len(pieces) >= min(count, 3)


def test_backward_in_pieces_can_be_followed_by_an_update(other):
    before = other.state_dict()
    other.forward(*nets.batch()), other.backward(), other.update()
    expected = other.state_dict()
    other.load_state_dict(before), other.reset_optimizer()
    other.forward(*nets.batch())
    for piece in other.pieces(3):
        with pytest.raises(BnfuseError, match="update needs a backward"):
            other.update()
        other.backward_piece(piece)
    other.update()
    for name, value in other.state_dict().items():
        np.testing.assert_array_equal(value, expected[name])


def test_pieces_out_of_order_are_refused(step):
    dy = output_gradient(step)
    ticket = step.run_forward(images())
    first, second, third = step.pieces(3)
    with pytest.raises(BnfuseError, match="piece 1 of 3 is out of order: it is the turn of piece 0, after a forward"):
        step.backward_piece(second, ticket=ticket)
    step.backward_piece(first, dy, ticket=ticket)
    for wrong, given in ((third, ()), (step.pieces(2)[1], ())):
        with pytest.raises(BnfuseError, match="it is the turn of piece 1 of 3"):
            step.backward_piece(wrong, *given, ticket=ticket)
    with pytest.raises(BnfuseError, match="backward needs a forward before it"):
        step.backward_piece(first, dy, ticket=ticket)
    with pytest.raises(BnfuseError, match="takes the gradients of 0 outputs: 1 are given"):
        step.backward_piece(second, dy, ticket=ticket)
    step.backward_piece(second, ticket=ticket), step.backward_piece(third, ticket=ticket)
    with pytest.raises(BnfuseError, match="out of order"):
        step.backward_piece(third, ticket=ticket)


@pytest.mark.parametrize("between", ["forward", "evaluate"])
def test_what_comes_between_is_noticed(step, between):
    dy = output_gradient(step)
    ticket = step.run_forward(images())
    first, *_ = step.pieces(2)
    assert step.is_current(ticket)
    step.run_forward(images(1)) if between == "forward" else step.evaluate(images(1))
    assert not step.is_current(ticket)
    with pytest.raises(BnfuseError, match="another call has overwritten"):
        step.backward_piece(first, dy, ticket=ticket)
    ticket = step.run_forward(images())
    step.backward_piece(first, dy, ticket=ticket)
    assert not step.is_current(ticket)
    step.evaluate(images())
    with pytest.raises(BnfuseError, match="another call has overwritten"):
        step.backward_piece(step.pieces(2)[1], ticket=ticket)


def test_a_ticket_goes_from_thread_to_thread(step):
    expected = wanted(step)
    ticket = step.run_forward(images())
    (piece,) = step.pieces(1)
    failures = []

    def backward() -> None:
        try:
            with pytest.raises(BnfuseError, match="another thread's: give its ticket"):
                step.backward_piece(piece, output_gradient(step))
            step.backward_piece(piece, output_gradient(step), ticket=ticket)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=backward)
    thread.start(), thread.join()
    assert not failures
    for name, value in step.gradients().items():
        np.testing.assert_array_equal(value, expected[name])


def test_the_pieces_of_another_batch_size_are_refused():
    made = without_loss(tiny_net, (4, 2))
    made.run_forward(images())
    pieces = made.pieces(2)
    ticket = made.run_forward(images()[:2])
    if pieces != made.pieces(2):
        with pytest.raises(BnfuseError, match="of another batch size"):
            made.backward_piece(pieces[0], output_gradient(made)[:2], ticket=ticket)
    made.backward_piece(made.pieces(2)[0], output_gradient(made)[:2], ticket=ticket)
    with pytest.raises(BnfuseError, match="pieces=0 is out of range"):
        made.pieces(0)
