"""Networks that nobody here wrote, pushed through: export, build, rewrite, verify, compile.

    python benchmarks/coverage.py [NAME...] [--group timm] [--exporter dynamo|script] [--stages build,rewrite,verify]
                                  [--folder DIR] [--target cuda] [--again] [--share 0.97]

The networks of benchmarks/networks: families of torchvision and timm, and ones written by hand. Weights are random and
nothing is downloaded. Each stage of each network runs in a child process of its own (a crash or a hang is that
network's alone), and what it found is a line of `FOLDER/EXPORTER.jsonl`; networks that are listed there are not run
again without --again. Ends with a table of stages and the refusals; the exit status is 1 where fewer than the share
come through all stages.

`verify` compares in onnxruntime, and in float64 where files are not equal there or cannot be judged. Four stages run
when asked for: `levels` verifies the file of each level, `float64` computes the rewritten file in float64 and compares
it with the torch module in float64, `run` compares compiled files, `exact` a compiled step with the module.

Needs torch, onnxscript, torchvision and timm.
"""

from __future__ import annotations

import argparse
import collections
import copy
import dataclasses
import fnmatch
import json
import multiprocessing
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import networks

STAGES = ("export", "build", "rewrite", "float64", "verify", "levels", "compile", "run", "exact")
OPTIONAL = ("float64", "levels", "run", "exact")  # not among the stages that are run unasked
LEVELS = ("rcf", "mvf", "bnff", "icf")
ROUNDING = 1e-5
CONSTANTS = 1e-6  # by how much float32 constants of a file (weights of a resize, epsilons) may move float64
DRAWS = 5  # batches
ROUNDINGS_OF_TORCH = 5.0  # how much larger than torch's own float32 errors ours may be


@dataclasses.dataclass(frozen=True)
class Where:
    """Where files lie, which exporter writes them, and what steps are compiled for."""

    folder: Path
    exporter: str
    target: str

    @property
    def options(self) -> dict[str, Any]:
        """What `compile` is told: one thread, or float32 on a GPU."""
        return {"threads": 1} if self.target == "cpu" else {"target": self.target, "precision": "fp32"}


def export(name: str, where: Where) -> dict[str, Any]:
    """Write the forward file as the README says (dynamo), or by the exporter before that (script)."""
    import torch

    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    network = networks.NETWORKS[name]
    module, inputs = network.make().train(), network.inputs()
    path = str(where.folder / f"{name}.onnx")
    if where.exporter == "dynamo":
        torch.onnx.export(module, inputs, path, dynamo=True, optimize=False, verbose=False)
    else:
        mode = torch.onnx.TrainingMode.TRAINING
        torch.onnx.export(module, inputs, path, dynamo=False, training=mode, do_constant_folding=False)
    norms = sum(isinstance(part, torch.nn.modules.batchnorm._BatchNorm) for part in module.modules())
    return {"batch_norm_modules": norms}


def build(name: str, where: Where) -> dict[str, Any]:
    """Build the training file."""
    import bnfuse
    from bnfuse.build import build as build_file

    network = networks.NETWORKS[name]
    path = where.folder / f"{name}.onnx"
    terms = network.terms([output.name for output in bnfuse.load(path).graph.outputs])
    built = build_file(path, loss=terms, train_bn=where.exporter == "dynamo")
    bnfuse.save(built.model, where.folder / f"{name}.train.onnx")
    return {"nodes": len(built.model.graph.node), "notes": built.notes}


def rewrite(name: str, where: Where) -> dict[str, Any]:
    """Rewrite at the highest level."""
    import bnfuse

    before = where.folder / f"{name}.train.onnx"
    done = bnfuse.rewrite(before, level="icf")
    bnfuse.save(done.model, where.folder / f"{name}.fused.onnx")
    report = done.report.to_json()
    reasons = collections.Counter(f"{each['half']}: {each['reason']}" for each in report["unfused"])
    unfused = len({each["node"] for each in report["unfused"]})
    over = bnfuse.diff(before, done.model).over_least
    return {
        "batch_norms": report["batch_norms"],
        "unfused": unfused,
        "over_least": over and round(over, 3),
        "reasons": reasons.most_common(),
    }


def verify(name: str, where: Where, runtime: str = "ort") -> dict[str, Any]:
    """Compare the two files, run by onnxruntime; in float64 where they are not equal there or cannot be judged."""
    import bnfuse

    before, after = (where.folder / f"{name}.{which}.onnx" for which in ("train", "fused"))
    found = bnfuse.verify(before, after, runtime=runtime, threads=1)
    result = {}
    if not found.equal:  # a ReLU at zero but for rounding says no too, in deep networks for every seed
        result = {"in_float32": found.verdict, "unjudged": len(found.unjudged), "tensors": len(found.tensors)}
        found = bnfuse.verify(before, after, runtime="float64")
    worst = [found.worst.tensor, found.worst.error, found.worst.tolerance]
    if not found.equal:
        raise AssertionError(f"{found.verdict}; the worst is {worst}")
    return {"equal": True, "worst": worst, **result}


def levels(name: str, where: Where) -> dict[str, Any]:
    """Compare the file of each level with the training file, as `verify` does with the highest one's."""
    import bnfuse

    before = where.folder / f"{name}.train.onnx"
    found = {}
    for level in LEVELS:
        bnfuse.save(bnfuse.rewrite(before, level=level).model, where.folder / f"{name}.fused.onnx")
        found[level] = verify(name, where)
    return found


def compile_step(name: str, where: Where) -> dict[str, Any]:
    """Compile the rewritten file for this processor."""
    import bnfuse

    step = bnfuse.compile(where.folder / f"{name}.fused.onnx", **where.options)
    return {"launches": step.program.report.launches if hasattr(step, "program") else None}


def run(name: str, where: Where) -> dict[str, Any]:
    """Compare the two files, compiled."""
    return verify(name, where, "tvm")


def rewritten_without_dropout(name: str, where: Where) -> tuple[Any, Any]:
    """Give the torch module and what its file becomes at the highest level, with dropout off in both."""
    import torch

    import bnfuse

    network = networks.NETWORKS[name]
    torch.manual_seed(0)
    torch.set_num_threads(1)
    module = without_dropout(network.make().train())
    path = where.folder / f"{name}.exact.onnx"
    torch.onnx.export(copy.deepcopy(module), network.inputs(), str(path), dynamo=True, optimize=False, verbose=False)
    terms = network.terms([output.name for output in bnfuse.load(path).graph.outputs])
    return module, bnfuse.rewrite(bnfuse.build_training_graph(path, loss=terms, train_bn=True), level="icf")


def float64(name: str, where: Where) -> dict[str, Any]:
    """Compare the rewritten file, computed by the interpreter of the tests in float64, with the module in float64.

    Rounding puts nothing on the other side of a ReLU's zero here, so one batch tells.
    """
    import onnx
    import onnx_ir as ir
    import torch

    from bnfuse.graph.training_graph import open_graph
    from bnfuse.verifying.interpreter import run, wide, widened

    network = networks.NETWORKS[name]
    module, rewritten = rewritten_without_dropout(name, where)
    inputs = network.inputs()
    labels = network.labels(module, inputs)
    truth = step_of_torch(module, inputs, labels, network.loss_of_torch, torch.float64)
    rewritten = ir.to_proto(rewritten.model)
    signature, model = open_graph(rewritten).signature, widened(rewritten)
    inputs_of_graph = {value.name for value in model.graph.input}
    state = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer if t.name in inputs_of_graph}
    fed = [value.name for value in model.graph.input if value.name not in state]
    feeds = dict(zip(fed, (each.numpy() for each in (*inputs, *labels)), strict=True))
    found = run(model, {**state, **wide(feeds)})
    running = {key: found[output] for key, output in signature.running.items()}
    errors = {
        "loss": abs(float(found["loss"]) - truth["loss"]) / abs(truth["loss"]),
        "gradients": distance({key: found[f"{key}_grad"] for key in truth["gradients"]}, truth["gradients"]),
        "statistics": distance(running, truth["statistics"]),
    }
    if not max(errors.values()) <= CONSTANTS:
        raise AssertionError(f"not the module's: {errors}")
    return errors


def exact(name: str, where: Where) -> dict[str, Any]:
    """Compare a compiled step with the module itself in float64, beside torch's own float32, over DRAWS batches.

    Errors are of all gradients together, and of all running statistics, in order of size. Dropout is off on both sides.
    The smallest ones are judged: an element that rounding puts on the other side of a ReLU's zero or a pooling's tie
    moves whole gradients on some batches, of either, and a mistake is wrong on every batch.
    """
    import numpy as np
    import torch

    import bnfuse

    network = networks.NETWORKS[name]
    module, rewritten = rewritten_without_dropout(name, where)
    step = bnfuse.compile(rewritten, **where.options)
    start = step.state_dict()
    errors: dict[str, list[list[float]]] = {"loss": [], "gradients": [], "statistics": []}
    for seed in range(DRAWS):
        inputs = network.inputs(1 + seed)
        labels = network.labels(module, inputs)
        step.load_state_dict(start)
        loss = float(step(*(each.numpy() for each in (*inputs, *labels))))
        gradients = {key.removesuffix("_grad"): np.asarray(value) for key, value in step.gradients().items()}
        truth, single = (
            step_of_torch(module, inputs, labels, network.loss_of_torch, kind)
            for kind in (torch.float64, torch.float32)
        )
        missing = sorted(set(truth["gradients"]) - set(gradients))
        if missing:
            raise AssertionError(f"no gradient of {missing[:3]}")
        errors["loss"].append([abs(each - truth["loss"]) / abs(truth["loss"]) for each in (loss, single["loss"])])
        for what, ours in (("gradients", gradients), ("statistics", step.state_dict())):
            errors[what].append([distance(each, truth[what]) for each in (ours, single[what])])
    found = {what: [sorted(each) for each in zip(*pairs, strict=True)] for what, pairs in errors.items()}
    for what, (ours, theirs) in found.items():
        if ours[0] > max(ROUNDING, ROUNDINGS_OF_TORCH * theirs[0]):
            raise AssertionError(f"{what}: off by {ours[0]:.1e} at best, torch's float32 by {theirs[0]:.1e}")
    return found


def without_dropout(module: Any) -> Any:
    """Set the rates of all that drops at random to 0: dropouts, stochastic depth, rates that modules pass on."""
    import torch

    for part in module.modules():
        for rate in ("p", "drop_prob", "drop_rate", "rate"):
            if isinstance(getattr(part, rate, None), float):
                setattr(part, rate, 0.0)
        if isinstance(part, torch.nn.modules.batchnorm._BatchNorm) and part.momentum is None:
            part.momentum = 0.1
    return module


def step_of_torch(
    module: Any, inputs: tuple[Any, ...], labels: tuple[Any, ...], loss: Callable[[Any, Any], Any], kind: Any
) -> dict[str, Any]:
    """Loss, gradients and new running statistics, the variance as ONNX counts it (biased)."""
    import torch

    module = copy.deepcopy(module).to(kind)
    norms = {
        name: part
        for name, part in module.named_modules()
        if isinstance(part, torch.nn.modules.batchnorm._BatchNorm) and part.track_running_stats and part.training
    }
    for part in norms.values():
        count_biased(part)
    given = module(*(each.to(kind) for each in inputs))
    value = loss(given, [each.to(kind) if each.is_floating_point() else each for each in labels])
    value.backward()
    statistics = {
        f"{name}.{what}": getattr(part, what).numpy()
        for name, part in norms.items()
        for what in ("running_mean", "running_var")
    }
    gradients = {name: each.grad.numpy() for name, each in module.named_parameters() if each.grad is not None}
    return {"loss": value.item(), "gradients": gradients, "statistics": statistics}


def count_biased(norm: Any) -> None:
    """Let each call of a BatchNorm of torch update its running variance by the biased one."""
    before = []

    def remember(*_: Any) -> None:
        before.append(norm.running_var.clone())

    def correct(_: Any, __: Any, y: Any) -> None:
        count = y.numel() // y.shape[1]  # elements of a channel
        kept = before.pop() * (1 - norm.momentum)
        norm.running_var.data = kept + (norm.running_var - kept) * (count - 1) / count

    norm.register_forward_pre_hook(remember)
    norm.register_forward_hook(correct)


def distance(ours: dict[str, Any], truth: dict[str, Any]) -> float:
    """Of all of them together, relative to the true ones; 0 where there are none."""
    import numpy as np

    error = sum(float(np.sum((np.asarray(ours[key], np.float64) - value) ** 2)) for key, value in truth.items())
    size = sum(float(np.sum(np.square(value))) for value in truth.values())
    return (error / size) ** 0.5 if size else 0.0


DOING = dict(zip(STAGES, (export, build, rewrite, float64, verify, levels, compile_step, run, exact), strict=True))


def child(stage: str, name: str, where: Where, pipe: Connection) -> None:
    from bnfuse.core.errors import BnfuseError

    started = time.time()
    try:
        found = DOING[stage](name, where)
        pipe.send({"ok": True, "seconds": round(time.time() - started, 1), **found})
    except BnfuseError as error:
        pipe.send({"ok": False, "kind": "refused", "error": " ".join(str(error).split())})
    except Exception as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"
        pipe.send({"ok": False, "kind": "error", "error": text, "trace": traceback.format_exc()[-2000:]})


def staged(stage: str, name: str, where: Where, limit: float) -> dict[str, Any]:
    """Run one stage in a child process."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=child, args=(stage, name, where, theirs))
    process.start()
    theirs.close()
    try:
        if not ours.poll(limit):
            process.kill()
            return {"ok": False, "kind": "timeout", "error": f"more than {limit:.0f} s"}
        return ours.recv()
    except EOFError:
        process.join(5)
        return {"ok": False, "kind": "crash", "error": f"the process died with {process.exitcode}"}
    finally:
        process.join(5)
        process.kill()  # one that has answered and does not end
        process.join()


def push(name: str, stages: list[str], where: Where, limit: float, again: bool) -> dict[str, Any]:
    """Push one network as far as it comes. Files that are there from an earlier export are taken."""
    found: dict[str, Any] = {"name": name}
    for stage in stages:
        if stage == "export" and not again and (where.folder / f"{name}.onnx").exists():
            found[stage] = {"ok": True, "kept": True}
            continue
        found[stage] = staged(stage, name, where, limit)
        if not found[stage]["ok"]:
            break
    return found


def last(found: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The last stage that was tried, and what came of it."""
    stage = [stage for stage in STAGES if stage in found][-1]
    return stage, found[stage]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=["*"], metavar="NAME", help="networks, globs too (all)")
    parser.add_argument("--group", help="torchvision, segmentation, timm or handwritten")
    parser.add_argument("--exporter", choices=("dynamo", "script"), default="dynamo")
    parser.add_argument("--target", default="cpu", help="what `compile` and `exact` compile for: cpu or cuda")
    parser.add_argument("--stages", default=",".join(stage for stage in STAGES if stage not in OPTIONAL))
    parser.add_argument("--folder", type=Path, default=Path(".coverage-networks"))
    parser.add_argument("--limit", type=float, default=600, help="seconds of a stage")
    parser.add_argument("--share", type=float, default=0.97)
    parser.add_argument("--again", action="store_true")
    options = parser.parse_args()
    where = Where(options.folder / options.exporter, options.exporter, options.target)
    where.folder.mkdir(parents=True, exist_ok=True)
    log = options.folder / f"{options.exporter}.jsonl"
    before = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    known = {} if options.again else {entry["name"]: entry for entry in before}
    stages = options.stages.split(",")
    chosen = [
        name
        for name, network in networks.NETWORKS.items()
        if any(fnmatch.fnmatch(name, glob) for glob in options.names) and options.group in (None, network.group)
    ]
    for name in chosen:
        if name not in known:
            known[name] = push(name, stages, where, options.limit, options.again)
            with log.open("a") as file:
                file.write(json.dumps(known[name]) + "\n")
            stage, result = last(known[name])
            print(
                f"{name:28} {stage:8} {'ok' if result['ok'] else result['kind'] + ': ' + result['error']}", flush=True
            )
    return report([known[name] for name in chosen], stages, options.share)


def report(found: list[dict[str, Any]], stages: list[str], share: float) -> int:
    """Print how many came through each stage, and why others did not."""
    exported = [entry for entry in found if entry.get("export", {"ok": True})["ok"]]
    print(f"\n{len(exported)} of {len(found)} networks export")
    for stage in (stage for stage in stages if stage != "export"):
        print(f"  {stage:8} {sum(entry.get(stage, {}).get('ok', False) for entry in exported)} of {len(exported)}")
    norms = sum(entry.get("rewrite", {}).get("batch_norms", 0) for entry in exported)
    print(f"  BatchNorms that keep a half: {sum(e.get('rewrite', {}).get('unfused', 0) for e in exported)} of {norms}")
    rewritten = [{"name": e["name"], **e["rewrite"]} for e in exported if e.get("rewrite", {}).get("ok")]
    if overs := [e["over_least"] for e in rewritten if e.get("over_least")]:
        print(f"  bytes of feature maps over the least: {median(overs):.3f} in the median, {max(overs):.2f} at most")
    for e in sorted((e for e in rewritten if e["unfused"]), key=lambda e: -e["unfused"]):
        print(f"    {e['name']}: {e['unfused']} of {e['batch_norms']}, {e.get('over_least')} times the least")
    through = [entry for entry in exported if last(entry)[1]["ok"]]
    for entry in (entry for entry in exported if entry not in through):
        stage, result = last(entry)
        print(f"  {entry['name']}: {stage}, {result['kind']}: {result['error'][:300]}")
    return 0 if exported and len(through) >= share * len(exported) else 1


if __name__ == "__main__":
    sys.exit(main())
