"""The software-managed cache against a slow one, against the optimum, and by hand."""

from __future__ import annotations

import itertools

from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tiny_workloads import step, workload

from bnfuse.estimating import cache, prefetching
from bnfuse.estimating.workload import Access, Layer, Tensor, Workload


def run(work: Workload, capacity: int, *, look_ahead: bool = True) -> cache.Residency:
    return cache.residency(work, capacity, look_ahead=look_ahead)


def traffic(work: Workload, capacity: int, *, look_ahead: bool = True) -> tuple[int, int]:
    found = run(work, capacity, look_ahead=look_ahead)
    loads = sum(load.bytes for loads in found.loads for load in loads)
    return loads + sum(found.stream_in), sum(found.leaving) + sum(found.stream_out)


@st.composite
def any_workload(draw) -> Workload:
    """Whole tensors and parts of them, some read and written by the same layer."""
    count = draw(st.integers(1, 7))
    kinds = st.sampled_from(("map", "weight", "vector"))
    tensors = tuple(
        Tensor(f"t{i}", draw(st.integers(1, 9)), draw(kinds), True, draw(st.booleans())) for i in range(count)
    )

    def accesses() -> tuple[Access, ...]:
        chosen = draw(st.lists(st.integers(0, count - 1), max_size=3, unique=True))
        part = st.integers(1, 9)
        whole = draw(st.booleans())
        sizes = [tensors[t].bytes if whole else min(draw(part), tensors[t].bytes) for t in chosen]
        return tuple(Access(t, size, draw(st.integers(1, 2))) for t, size in zip(chosen, sizes, strict=True))

    layers = tuple(
        Layer(f"l{i}", "Other", "forward", draw(st.integers(0, 9)), accesses(), accesses())
        for i in range(draw(st.integers(1, 12)))
    )
    return Workload("any", 1, tensors, layers)


class SlowCache:
    """The rules of cache.py's docstring, word by word: looks through everything each time."""

    def __init__(self, work: Workload, capacity: int) -> None:
        self.work, self.capacity = work, capacity
        self.there: dict[int, int] = {}
        self.dirty: dict[int, int] = {}
        self.came = self.left = 0

    def sizes(self, layer: Layer, tensor: int) -> tuple[int, int]:
        size = self.work.tensors[tensor].bytes
        read = sum(a.bytes for a in layer.reads if a.tensor == tensor)
        written = sum(a.bytes for a in layer.writes if a.tensor == tensor)
        return min(read, size), min(written, size)

    def touching(self, tensor: int, index: int) -> int | None:
        later = enumerate(self.work.layers[index + 1 :], index + 1)
        return next((i for i, layer in later if any(a.tensor == tensor for a in layer.accesses)), None)

    def next_use(self, tensor: int, index: int) -> float:
        """The next layer after `index` that needs the value."""
        found = self.touching(tensor, index)
        if found is None:
            return float("inf")
        read, written = self.sizes(self.work.layers[found], tensor)
        return found if read or written < self.work.tensors[tensor].bytes else float("inf")

    def matters(self, tensor: int, index: int) -> bool:
        """Whether what layer `index` left in the tensor is needed again, or at the end."""
        last = self.touching(tensor, index) is None
        return self.next_use(tensor, index) < float("inf") or (last and self.work.tensors[tensor].kept)

    def forget(self, tensor: int, write: bool) -> None:
        if write:
            self.left += self.dirty.get(tensor, 0)
        self.there.pop(tensor, None)
        self.dirty.pop(tensor, None)

    def run(self) -> tuple[int, int]:
        for index, layer in enumerate(self.work.layers):
            self.step(index, layer)
        return self.came, self.left

    def step(self, index: int, layer: Layer) -> None:
        touched = list(dict.fromkeys(a.tensor for a in layer.accesses))
        size = {t: max(*self.sizes(layer, t), self.there.get(t, 0)) for t in touched}
        held = list(touched)
        if sum(size.values()) > self.capacity:
            weight = {t: self.work.tensors[t].kind == "weight" for t in touched}
            order = sorted(touched, key=lambda t: (t not in self.there, not weight[t], self.next_use(t, index)))
            held = []
            for t in order:
                if sum(size[h] for h in held) + size[t] <= self.capacity:
                    held.append(t)
        for t in touched:
            if t not in held:
                self.forget(t, write=True)
                self.came += sum(a.bytes * a.sweeps for a in layer.reads if a.tensor == t)
                if self.matters(t, index):
                    self.left += sum(a.bytes * a.sweeps for a in layer.writes if a.tensor == t)
        while sum((self.there | {t: size[t] for t in held}).values()) > self.capacity:
            others = [t for t in self.there if t not in held]
            self.forget(max(others, key=lambda t: (self.next_use(t, index), -t)), write=True)
        for t in held:
            read, written = self.sizes(layer, t)
            self.came += max(0, read - self.there.get(t, 0))
            self.there[t] = size[t]
            self.dirty[t] = min(size[t], self.dirty.get(t, 0) + written)
        for t in held:
            if self.next_use(t, index) == float("inf"):
                self.forget(t, write=self.matters(t, index))


@settings(max_examples=400, deadline=None)
@given(any_workload(), st.integers(1, 40), st.booleans())
def test_traffic_is_that_of_the_slow_cache(work, capacity, look_ahead):
    assert traffic(work, capacity, look_ahead=look_ahead) == SlowCache(work, capacity).run()


def fewest_loads(reads: list[int], capacity: int) -> int:
    """The optimum of all ways to keep `capacity` tensors of one byte, by search. A layer holds what it reads."""
    states = {frozenset(): 0}
    for tensor in reads:
        after: dict[frozenset, int] = {}
        for kept, loads in states.items():
            there = kept | {tensor}
            cost = loads + (tensor not in kept)
            for size in range(min(capacity, len(there))):
                for chosen in itertools.combinations(there - {tensor}, size):
                    key = frozenset({tensor, *chosen})
                    after[key] = min(after.get(key, cost), cost)
        states = after
    return min(states.values())


one_read_a_layer = st.lists(st.integers(0, 5), min_size=1, max_size=14)


def reading(reads: list[int]) -> Workload:
    return workload({f"t{i}": 1 for i in range(6)}, [step(f"l{n}", 1, f"t{t}") for n, t in enumerate(reads)])


@settings(max_examples=150, deadline=None)
@given(one_read_a_layer, st.integers(1, 5))
def test_replacing_the_farthest_next_use_loads_as_little_as_any_choice(reads, capacity):
    assert traffic(reading(reads), capacity) == (fewest_loads(reads, capacity), 0)


@given(one_read_a_layer, st.integers(1, 5))
def test_where_tensors_are_of_one_size_a_larger_cache_loads_no_more(reads, capacity):
    assert traffic(reading(reads), capacity + 1)[0] <= traffic(reading(reads), capacity)[0]


def compulsory(work: Workload) -> tuple[int, int]:
    """Of whole tensors: what is read before it is written must come, what is kept must go."""
    first: dict[int, bool] = {}
    written = set()
    for layer in work.layers:
        for access in layer.reads:
            first.setdefault(access.tensor, True)
        for access in layer.writes:
            first.setdefault(access.tensor, False)
            written.add(access.tensor)
    sizes = [tensor.bytes for tensor in work.tensors]
    return sum(sizes[t] for t, reads in first.items() if reads), sum(sizes[t] for t in written if work.tensors[t].kept)


@st.composite
def whole_tensors(draw) -> Workload:
    sizes = {f"t{i}": draw(st.integers(1, 9)) for i in range(draw(st.integers(1, 7)))}
    some = st.lists(st.sampled_from([*sizes]), max_size=3, unique=True).map(" ".join)
    steps = [step(f"l{i}", draw(st.integers(0, 9)), draw(some), draw(some)) for i in range(draw(st.integers(1, 12)))]
    return workload(sizes, steps, kept=draw(some), weights=draw(some))


@given(whole_tensors(), st.integers(1, 60))
def test_traffic_is_never_less_than_what_must_move(work, capacity):
    came, left = traffic(work, capacity)
    least = compulsory(work)
    assert came >= least[0] and left >= least[1]


@given(whole_tensors())
def test_a_cache_for_all_tensors_moves_just_what_must(work):
    assert traffic(work, sum(tensor.bytes for tensor in work.tensors)) == compulsory(work)


@settings(deadline=None)
@given(any_workload(), st.integers(1, 40), st.sampled_from(("latency", "next", "none")), st.booleans())
def test_the_cache_is_never_over_full_prefetched_tensors_included(work, capacity, how, look_ahead):
    found = run(work, capacity, look_ahead=look_ahead)
    used = [*found.occupied]
    compute = [float(layer.flops) for layer in work.layers]
    issued = prefetching.issued(found, capacity, 1.0, compute, how)
    for first, loads in issued.items():
        for load in loads:
            used[first : load.layer] = [there + load.bytes for there in used[first : load.layer]]
    assert used == found.occupied
    assert all(0 <= there <= capacity for there in used)
    wanted = [load for loads in found.loads for load in loads]
    chosen = [(index, load) for index, loads in issued.items() for load in loads]
    assert len({load for _, load in chosen}) == len(chosen) and {load for _, load in chosen} <= {*wanted}
    assert all(load.after < index < load.layer for index, load in chosen)


@given(any_workload(), st.integers(1, 40))
def test_looking_ahead_moves_the_same_but_earlier(work, capacity):
    early, late = run(work, capacity), run(work, capacity, look_ahead=False)
    assert [[x[:3] for x in loads] for loads in early.loads] == [[x[:3] for x in loads] for loads in late.loads]
    sums = [list(itertools.accumulate(found.leaving)) for found in (early, late)]
    assert sums[0][-1] == sums[1][-1]
    assert all(a >= b for a, b in zip(*sums, strict=True))


def test_the_farthest_next_use_leaves():
    steps = [
        step("a", 1, "x"),
        step("b", 1, "y"),
        step("c", 1, "z"),
        step("d", 1, "y"),
        step("e", 1, "x"),
    ]
    found = run(workload({"x": 4, "y": 4, "z": 4}, steps), 8)
    assert [[load.tensor for load in loads] for loads in found.loads] == [[0], [1], [2], [], [0]]


def test_a_clean_copy_leaves_for_nothing_and_a_dirty_one_is_written_out_once():
    steps = [
        step("make", 1, "", "x"),
        step("big1", 1, "y"),
        step("use", 1, "x"),
        step("big2", 1, "y"),
        step("use2", 1, "x"),
    ]
    work = workload({"x": 4, "y": 8}, steps)
    found = run(work, 8)
    assert found.leaving == [4, 0, 0, 0, 0]
    assert traffic(work, 8) == (4 + 8 + 4 + 8, 4)


def test_what_is_dead_is_not_written_out_and_what_is_kept_is():
    work = workload({"x": 4, "y": 4, "z": 2}, [step("make", 1, "", "x z"), step("use", 1, "x", "y")], kept="y")
    assert run(work, 100).leaving == [0, 4]


def test_a_value_that_will_be_written_over_is_dead():
    steps = [step("make", 1, "", "x"), step("big", 1, "y"), step("again", 1, "", "x"), step("use", 1, "x")]
    assert traffic(workload({"x": 4, "y": 8}, steps), 8) == (8, 0)


def test_tensors_that_do_not_fit_stream_and_the_weight_stays_whole():
    steps = [step("conv", 1, "x w", "y"), step("next", 1, "y", "z")]
    found = run(workload({"x": 10, "w": 3, "y": 10, "z": 1}, steps, weights="w"), 8)
    assert [load.tensor for load in found.loads[0]] == [1]
    assert (found.stream_in, found.stream_out) == ([10, 10], [10, 0])


def test_what_streams_is_fetched_in_each_sweep_and_what_is_held_once():
    work = workload({"x": 10, "y": 1}, [step("norm", 1, "x", "y", sweeps=2)])
    assert traffic(work, 8)[0] == 20
    assert traffic(work, 11)[0] == 10


def test_a_part_of_a_tensor_takes_its_part_of_the_cache():
    tensors = (Tensor("x", 10, "map", given=True),)
    layers = tuple(
        Layer(name, "Other", "forward", 1, (Access(0, size),), ())
        for name, size in (("few", 3), ("more", 7), ("all", 10))
    )
    found = run(Workload("parts", 1, tensors, layers), 10)
    assert [[load.bytes for load in loads] for loads in found.loads] == [[3], [4], [3]]
    assert found.occupied == [3, 7, 10]


@given(any_workload())
def test_a_layer_touches_each_tensor_once(work):
    assume(work.layers)
    for layer, touches in zip(work.layers, work.touches, strict=True):
        assert sorted(touch.tensor for touch in touches) == sorted({access.tensor for access in layer.accesses})
