"""A step as a guest in somebody's process: threads that come and go, forks, signals, a process that ends."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time

import onnx.parser
import pytest

from bnfuse.build import build_training_graph
from bnfuse.core import processors
from bnfuse.core.processors import usable_cpus
from bnfuse.graph.io import save
from bnfuse.runtime import SGD, compile_step

TIME = 120  # seconds that a script may take on a busy machine: what hangs, hangs for ever

NETWORK = """
<ir_version: 8, opset_import: ["": 17]>
net (float[4,3,6,6] x) => (float[4,5] logits)
<float[4,3,1,1] w = {WEIGHTS}, float[4] scale = {1, 1, 1, 1}, float[4] shift = {0, 0, 0, 0},
 float[4] mean = {0, 0, 0, 0}, float[4] var = {1, 1, 1, 1},
 float[4,5] v = {CLASSES}, float[5] b = {0, 0, 0, 0, 0}>
{
    c = Conv (x, w)
    n, rm, rv = BatchNormalization <training_mode: int = 1> (c, scale, shift, mean, var)
    r = Relu (n)
    g = GlobalAveragePool (r)
    f = Flatten (g)
    logits = Gemm (f, v, b)
}
"""
NETWORK = NETWORK.replace("WEIGHTS", "1, 0.5, -1, 0.25, -2, 1, 0.5, 0.5, 1, -1, 1, 0.75").replace(
    "CLASSES", "1, -1, 0.5, 0.25, 0, 0.5, 1, -1, 0, 1, -0.5, 0, 1, 1, -1, 0.25, 0.75, 0, -1, 1"
)

PRELUDE = """
import os, sys, threading, time
import numpy as np
import bnfuse

STEP, GRAPH = {step!r}, {graph!r}
images = np.random.default_rng(0).standard_normal((4, 3, 6, 6), dtype=np.float32)
labels = np.arange(4)

def wait_for(what):
    while not what():
        time.sleep(0.01)

def in_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()

def child(work):
    "The exit status of a forked child that does the work and ends as any program does."
    pid = os.fork()
    if pid == 0:
        work()
        sys.exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def losses(count):
    step = bnfuse.open_step(STEP)
    return [step(images, labels) for _ in range(count)]

def require(condition, what=""):
    if not condition:
        print("not as it should be:", what, flush=True)
        os._exit(1)
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> tuple[pathlib.Path, pathlib.Path]:
    """A compiled step of two threads, and its graph."""
    folder = tmp_path_factory.mktemp("processes")
    graph = folder / "train.onnx"
    save(build_training_graph(onnx.parser.parse_model(NETWORK)), graph)
    step = compile_step(graph, optimizer=SGD(lr=0.1, momentum=0.9), threads=2)
    step.export(folder / "step.bnf")
    return folder / "step.bnf", graph


@pytest.fixture
def script(files):
    """Runs Python in a process of its own and gives what it prints."""

    def run(text: str, *, status: int = 0, name: str | None = None) -> str:
        code = PRELUDE.format(step=str(files[0]), graph=str(files[1])) + text
        if name:
            (files[0].parent / name).write_text(code)
        command = [sys.executable, *([str(files[0].parent / name)] if name else ["-c", code])]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIME, check=False)
        assert done.returncode == status, done.stdout + done.stderr
        assert "Traceback" not in done.stderr and "terminate" not in done.stderr, done.stderr
        return done.stdout + done.stderr

    return run


def test_one_step_called_by_four_threads_gives_the_losses_of_as_many_calls(script):
    script("""
found, step = [], bnfuse.open_step(STEP)
threads = [threading.Thread(target=lambda: found.extend([step(images, labels) for _ in range(50)])) for _ in range(4)]
readers = [threading.Thread(target=lambda: [(step.evaluate(images), step.state_dict()) for _ in range(20)])]
for thread in threads + readers: thread.start()
for thread in threads + readers: thread.join()
require(sorted(found) == sorted(losses(200)), "losses")
require(step.steps == 200, step.steps)
""")


def test_two_steps_run_and_a_graph_is_compiled_in_threads_at_once(script):
    script("""
expected, found, made = losses(50), [], []
threads = [threading.Thread(target=lambda: found.append(losses(50))) for _ in range(2)]
threads += [threading.Thread(target=lambda: made.append(bnfuse.compile(GRAPH, cache=False, threads=2)))]
for thread in threads: thread.start()
for thread in threads: thread.join()
require(found == [expected] * 2, "losses")
require(made[0](images, labels) == expected[0], "loss of what was compiled")
""")


def test_phases_of_two_threads_do_not_mix(script):
    script("""
step = bnfuse.open_step(STEP)
step.forward(images, labels)
def backward():
    try: step.backward()
    except bnfuse.BnfuseError as error: said.append(str(error))
said = []
in_thread(backward)
require(said and "another thread" in said[0], said)
step.backward()
step.update()
require(step.steps == 1)
""")


def test_threads_that_come_and_go_leave_nothing_behind(script):
    script("""
step = bnfuse.open_step(STEP)
step(images, labels)
count = lambda: len(os.listdir("/proc/self/task"))
before = count()
for _ in range(100): in_thread(lambda: step(images, labels))
wait_for(lambda: count() <= before)
in_thread(lambda: bnfuse.compile(GRAPH)(images, labels))
wait_for(lambda: count() <= before)
""")


def test_a_forked_child_holds_calls_and_compiles_steps(script):
    script("""
expected = losses(3)
step = bnfuse.open_step(STEP)
require(step(images, labels) == expected[0])

def call():
    require([step(images, labels) for _ in range(2)] == expected[1:], "losses in the child")
    require(child(lambda: step(images, labels)) == 7, "a child of the child")

def compile():
    made = bnfuse.compile(GRAPH, cache=False, threads=2, optimizer=bnfuse.SGD(lr=0.1, momentum=0.9))
    require([made(images, labels) for _ in range(3)] == expected, "losses of what the child compiled")

require(child(lambda: None) == 7, "holds")
require(child(call) == 7, "calls")
time.sleep(0.5)  # threads of a pool that wait are asleep now
require(child(call) == 7, "calls later")
require(child(compile) == 7, "compiles")
require([step(images, labels) for _ in range(2)] == expected[1:], "losses in the parent")
""")


def test_a_fork_while_another_thread_runs_a_step_leaves_a_whole_step(script):
    script("""
step, ends, count = bnfuse.open_step(STEP), threading.Event(), []
expected, start = losses(21), STEP + ".safetensors"
step.save(start)

def run():
    while not ends.is_set():
        step.load(start)
        count.extend(step(images, labels) for _ in range(20))

def go_on():
    done = step.steps
    require(step(images, labels) == expected[done], "the child's step is torn")

thread = threading.Thread(target=run)
thread.start()
for _ in range(3):
    before = len(count)
    wait_for(lambda: len(count) > before)
    require(child(go_on) == 7)
ends.set()
thread.join()
require(count[:20] == expected[:20], "losses in the parent")
""")


def test_a_process_that_is_spawned_from_a_script_without_a_guard_compiles(script):
    """Workers of a compilation do not run the script again."""
    said = script(
        "from bnfuse.runtime.codegen import build\nbuild.KERNELS_PER_WORKER = 2\nprint('begins')\n"
        "step = bnfuse.compile(GRAPH, cache=False)\nprint('made', np.isfinite(step(images, labels)))",
        name="unguarded.py",
    )
    assert said.split() == ["begins", "made", "True"]


def test_a_process_ends_in_order_while_daemon_threads_run_steps(script):
    said = script("""
import atexit
step, count = bnfuse.open_step(STEP), []
atexit.register(lambda: print("last", np.isfinite(step(images, labels))))

def run():
    while True: count.append(step(images, labels))

for _ in range(3): threading.Thread(target=run, daemon=True).start()
wait_for(lambda: len(count) > 20)
""")
    assert said.split() == ["last", "True"]


def test_a_thread_that_outlives_the_main_one_goes_on(script):
    said = script("""
def run():
    time.sleep(0.5)
    print(len(losses(20)))
threading.Thread(target=run).start()
""")
    assert said.split() == ["20"]


@pytest.mark.torch
def test_workers_of_a_data_loader_hold_a_step(script):
    said = script("""
import torch
step = bnfuse.open_step(STEP)
step(images, labels)

class Set(torch.utils.data.Dataset):
    def __init__(self): self.step = step
    def __len__(self): return 8
    def __getitem__(self, index): return torch.tensor(index)

loader = torch.utils.data.DataLoader(Set(), batch_size=4, num_workers=2, multiprocessing_context="fork")
for batch in loader: print(batch.tolist(), np.isfinite(step(images, labels)))
""")
    assert said.splitlines() == ["[0, 1, 2, 3] True", "[4, 5, 6, 7] True"]


def test_the_end_of_a_process_does_not_wait_for_threads(script):
    """A step for 64 threads runs on as many as there are processors, and its process ends at once."""
    said = script("""
import subprocess
from bnfuse.runtime.targets.cpus import host_cpu
step = bnfuse.compile(GRAPH, target=f"cpu:{host_cpu()}", threads=64)
require(np.isfinite(step(images, labels)))
require(step.target.threads == 64 and len(os.listdir("/proc/self/task")) < 20 + os.cpu_count())
print(time.time())
""")
    assert time.time() - float(said) < 10


# -- signals -------------------------------------------------------------------------------------------------------

COMMAND = """
import sys
sys.argv = ["bnfuse", *sys.argv[1:]]
import bnfuse.core.interrupts
print("up", flush=True)
from bnfuse.runtime.codegen import build
build.KERNELS_PER_WORKER = 2
from bnfuse.cli import main
sys.exit(main())
"""


def compiling(files, tmp_path, *arguments: str) -> subprocess.Popen[str]:
    """`bnfuse compile` with an empty cache and a worker, from the moment at which the package is first imported."""
    output = ("compile", str(files[1]), "-o", str(tmp_path / "new.bnf"), *arguments)
    started = subprocess.Popen(
        [sys.executable, "-c", COMMAND, *output],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "BNFUSE_CACHE": str(tmp_path / "cache")},
    )
    assert started.stdout
    assert started.stdout.readline() == "up\n"
    return started


def children_of(process: subprocess.Popen[str]) -> list[int]:
    try:
        listed = pathlib.Path(f"/proc/{process.pid}/task").glob("*/children")
        return [int(child) for path in listed for child in path.read_text().split()]
    except OSError:
        return []


def is_alive(pid: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until(what) -> None:
    end = time.monotonic() + TIME
    while not what():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("moment", ["start", "import", "work"])
def test_an_interrupted_command_ends_with_one_line_and_leaves_nothing(files, tmp_path, number, status, moment):
    process = compiling(files, tmp_path)
    if moment == "import":
        time.sleep(0.3)
    elif moment == "work":
        wait_until(lambda: children_of(process))
    workers = children_of(process)
    process.send_signal(number)
    _, said = process.communicate(timeout=TIME)
    assert process.returncode == status, said
    assert said.count("\n") == 1
    wait_until(lambda: not any(map(is_alive, workers)))
    assert not list(tmp_path.glob("*.bnf*"))


def test_workers_end_with_a_parent_that_is_killed(files, tmp_path):
    process = compiling(files, tmp_path)
    wait_until(lambda: children_of(process))
    workers = children_of(process)
    process.kill()
    process.communicate(timeout=TIME)
    end = time.monotonic() + 10
    wait_until(lambda: not any(map(is_alive, workers)))
    assert time.monotonic() < end


def test_more_threads_than_processors_are_lowered_with_a_note_and_end_at_once(files, tmp_path):
    process = compiling(files, tmp_path, "--threads", "1000")
    printed, said = process.communicate(timeout=TIME)
    ended = time.time()
    assert process.returncode == 0, said
    assert ended - (tmp_path / "new.bnf").stat().st_mtime < 10  # seconds; a tenth of one on an idle machine
    assert [line for line in said.splitlines() if "taking" in line] == [
        f"bnfuse: 1000 threads are more than the processors that this process may use: taking {usable_cpus()}"
    ]
    assert f"{usable_cpus()} threads" in printed


# -- the processors of a process -----------------------------------------------------------------------------------


def test_an_affinity_mask_and_a_quota_bound_the_threads(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    monkeypatch.setattr(processors, "CGROUPS", tmp_path)
    monkeypatch.setattr(processors, "OWN_CGROUPS", tmp_path / "own")
    assert usable_cpus() == 6
    (tmp_path / "own").write_text("0::/user/session\n")
    (tmp_path / "user" / "session").mkdir(parents=True)
    (tmp_path / "user" / "session" / "cpu.max").write_text("max 100000\n")
    (tmp_path / "user" / "cpu.max").write_text("250000 100000\n")
    assert usable_cpus() == 3
    (tmp_path / "own").write_text("4:cpu,cpuacct:/mine\n0::/elsewhere\n")
    (tmp_path / "cpu,cpuacct").mkdir()
    (tmp_path / "cpu,cpuacct" / "cpu.cfs_quota_us").write_text("50000")
    (tmp_path / "cpu,cpuacct" / "cpu.cfs_period_us").write_text("100000")
    assert usable_cpus() == 1
    assert processors.bounded_threads(5) == 1
