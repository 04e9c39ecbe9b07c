"""BatchNorms as exporters leave them: which of them train, and what their running statistics are.

training_mode=0, --train-bn      a training BN with new running statistics; it stays frozen where torch's exporter says
                                 that it was in evaluation mode while others were not (a frozen backbone)
training_mode=0 beside others    stays frozen: y = a*x + b (decompose/batch_norm.py)
--freeze-bn GLOB                 frozen, though the file has it in training mode
called twice (Siamese)           the second call updates what the first one gives
statistics computed from the batch (track_running_stats=False)    constants whose update nobody reads
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

import numpy as np
import onnx

from bnfuse.core.errors import BnfuseError
from bnfuse.core.text import some
from bnfuse.graph.module_state import MODULE_KEY
from bnfuse.graph.protos import attributes, fresh, set_attribute

from .graph import Forward

RUNNING_VARIANCES = ("onnx", "torch")  # moved by the biased variance of the batch, or by the unbiased one


def check_definition(running_variance: str) -> None:
    """Raise BnfuseError unless it is one of RUNNING_VARIANCES."""
    if running_variance not in RUNNING_VARIANCES:
        known = " or ".join(RUNNING_VARIANCES)
        raise BnfuseError(f"--running-variance {running_variance} is no definition of a running variance: give {known}")


def tell_definition(forward: Forward, running_variance: str) -> None:
    """Note that running variances follow another definition than ONNX's."""
    training = [node for node in batch_norms(forward) if is_training(node)]
    if running_variance == "torch" and training:
        forward.note(
            f"the running variances of {len(training)} BatchNormalization nodes are moved by the unbiased variance of "
            "the batch, as torch does it (unbiased=1)"
        )


def batch_norms(forward: Forward) -> list[onnx.NodeProto]:
    """List the BatchNormalizations, in the order of the nodes."""
    return [node for node in forward.graph.node if node.op_type == "BatchNormalization"]


def is_training(node: onnx.NodeProto) -> bool:
    """Tell whether a BatchNormalization normalises by the statistics of the batch."""
    return bool(attributes(node).get("training_mode"))


def train_batch_norms(
    forward: Forward, trained: set[str], *, train_bn: bool, frozen_bn: bool, freeze_bn: Sequence[str] = ()
) -> None:
    """Turn BNs whose results are in `trained`, or on request all, into training BNs with new running statistics; those
    that the globs `freeze_bn` match into frozen ones.

    Raises where a file has none that trains, and nothing says what is meant by it.
    """
    chosen = freeze_batch_norms(forward, freeze_bn)
    norms = [node for node in batch_norms(forward) if node.name not in chosen]
    changed = 0
    evaluated = in_evaluation_mode(norms)
    training = [n for n in norms if n.output[0] in trained or (train_bn and n.name not in evaluated)]
    for node in training:
        if not is_training(node):
            changed += 1
            set_attribute(node, "training_mode", 1)
        _name_running_outputs(forward, node)
    if changed:
        why = "--train-bn" if train_bn else "the file's opset has no training_mode that would freeze them"
        of_module = any(entry.key == MODULE_KEY for entry in forward.model.metadata_props)
        if of_module and not any(is_evaluated(node) for node in training):
            why = "they are in training mode in the module"
        forward.note(f"{changed} BatchNormalization nodes made to train ({why})")
    remedy = "Export the module with them in training mode to train them" if train_bn else "--train-bn trains them"
    _tell_frozen(
        forward, [node for node in norms if not is_training(node)], frozen_bn or bool(training or chosen), remedy
    )
    from_data = forward.from_data()
    training = [node for node in training if node.input[0] in from_data]
    for momentum, what in ((1.0, "never move"), (0.0, "are those of the last batch alone")):
        odd = [node.name for node in training if attributes(node).get("momentum", 0.9) == momentum]
        if odd:
            forward.note(
                f"the running statistics of {some(odd)} {what}: momentum={momentum:g} in the file, which is what torch "
                "writes for momentum=None. `rewrite --decay A` sets another"
            )


def freeze_batch_norms(forward: Forward, globs: Sequence[str]) -> set[str]:
    """Freeze the BatchNormalizations that the globs match: they normalise by their running statistics, which stay.

    A glob is of the node's name, of a parameter's, or of the module's, which is a parameter's without its last part.
    Gives the names of the nodes. Raises for a glob that matches none, and where there are no running statistics.
    """
    norms, known = batch_norms(forward), forward.initializers()
    for glob in globs:
        if not any(is_named_like(node, glob) for node in norms):
            modules = [module_of(node.input[1]) for node in norms if len(node.input) > 1]
            there = f"there are {some(modules)}" if modules else "there is none"
            raise forward.error(f"--freeze-bn '{glob}' matches no BatchNormalization ({there})")
    chosen = [node for node in norms if any(is_named_like(node, glob) for glob in globs)]
    for node in chosen:
        if len(node.input) < 5 or any(name not in known for name in node.input[3:5]):
            raise forward.error_at(node, "has no running statistics of its own: --freeze-bn needs them")
        instead = dict(zip(node.output[1:3], node.input[3:5], strict=False))
        for reader in forward.graph.node:
            for index, name in enumerate(reader.input):
                reader.input[index] = instead.get(name, name) if name else name
        set_attribute(node, "training_mode", 0)
        del node.output[1:]
    if chosen:
        forward.note(
            f"{len(chosen)} BatchNormalization nodes are frozen by --freeze-bn ({some([n.name for n in chosen])}): "
            "they normalise by their running statistics, which no step changes"
        )
    return {node.name for node in chosen}


def is_named_like(node: onnx.NodeProto, glob: str) -> bool:
    """Tell whether a glob matches a BatchNormalization, one of its operands, or its module."""
    names = [node.name, *node.input[1:5]]
    return any(fnmatch.fnmatchcase(name, glob) for name in (*names, *map(module_of, names[1:])))


def module_of(name: str) -> str:
    """Give the name of a parameter without its last part: layer1.0.bn1.weight is of layer1.0.bn1."""
    return name.rpartition("." if "." in name else "/")[0] or name


def in_evaluation_mode(norms: list[onnx.NodeProto]) -> set[str]:
    """Name the BatchNormalizations that torch's dynamo exporter found in evaluation mode, others in training.

    It writes all of them for inference, and the operator of torch that each came from beside them.
    """
    evaluated = {node.name for node in norms if is_evaluated(node)}
    return evaluated if len(evaluated) < len(norms) else set()


def is_evaluated(node: onnx.NodeProto) -> bool:
    """Tell whether torch's dynamo exporter found a BatchNormalization in evaluation mode."""
    said = (entry.value for entry in node.metadata_props if entry.key == "pkg.torch.onnx.fx_node")
    return any("batch_norm_legit_no_training" in text for text in said)


def tell_none(forward: Forward) -> None:
    """Note that there is none for --train-bn to train."""
    if not batch_norms(forward):
        forward.note("--train-bn found no BatchNormalization: exporters for inference fold it into the convolutions")


def _tell_frozen(forward: Forward, frozen: list[onnx.NodeProto], meant: bool, remedy: str) -> None:
    if frozen and not meant:
        raise forward.error_at(
            frozen[0],
            "has training_mode=0: its statistics are frozen, so there is nothing to split. "
            "Pass --train-bn to train it, or --frozen-bn to keep it frozen.",
        )
    for node in frozen:
        if len(node.input) < 5 or not all(node.input[1:5]):
            raise forward.error_at(
                node, "lacks its scale, bias or running statistics: export it with all five operands."
            )
    if frozen:
        forward.note(
            f"{len(frozen)} BatchNormalization nodes stay frozen ({some([node.name for node in frozen])}): they "
            f"normalise by their running statistics, which no step changes. {remedy}"
        )


def _name_running_outputs(forward: Forward, node: onnx.NodeProto) -> None:
    if len(node.output) >= 3 and all(node.output[1:3]):
        return
    taken = forward.names()
    y = node.output[0]
    given = list(node.output[1:3]) + [""] * (3 - len(node.output))
    defaults = (f"{node.name}/new_running_mean", f"{node.name}/new_running_var")
    names = [name or fresh(default, taken) for name, default in zip(given, defaults, strict=True)]
    del node.output[:]
    node.output.extend([y, *names])


def copied_statistics(forward: Forward) -> dict[str, list[str]]:
    """Map BatchNorms that share scale and bias with another, and whose statistics are copies of that one's, to those.

    torch's exporter writes the second call of a module so: the statistics that the first call gives are an Identity of
    those that it reads. Of two modules that are merged for their equal values, scale and bias would be copies too.
    """
    makers = forward.producers()
    owners: dict[tuple[str, ...], list[str]] = {}
    found: dict[str, list[str]] = {}
    for node in batch_norms(forward):
        if len(node.input) < 5:
            continue
        whole = []
        for name in node.input[3:5]:
            while (maker := makers.get(name)) is not None and maker.op_type == "Identity":
                name = maker.input[0]
            whole.append(name)
        first = owners.get(tuple(node.input[1:3]))
        if first is None:
            owners[tuple(node.input[1:3])] = whole
        elif first == whole != list(node.input[3:5]):
            found[node.name] = whole
    return found


def join_copied_statistics(forward: Forward, copied: dict[str, list[str]]) -> None:
    """Let the BatchNorms that `copied` names read the statistics themselves."""
    for node in batch_norms(forward):
        if node.name in copied:
            node.input[3], node.input[4] = copied[node.name]


def chain_running_statistics(forward: Forward) -> None:
    """Let each further call of one BatchNorm update the running statistics that the call before it gives."""
    latest: dict[str, str] = {}
    calls: dict[str, list[str]] = {}
    for node in batch_norms(forward):
        if not is_training(node) or len(node.input) < 5:
            continue
        for index in (3, 4):
            statistic = node.input[index]
            calls.setdefault(statistic, []).append(node.name)
            node.input[index] = latest.get(statistic, statistic)
            latest[statistic] = node.output[index - 2]
    if several := [names for names in calls.values() if len(names) > 1]:
        forward.note(
            f"{some(sorted({names[0] for names in several}))} called several times ({some(several[0])}): each call "
            "updates the running statistics in its turn"
        )


def stand_in_for_statistics(forward: Forward) -> set[str]:
    """Give BatchNorms that compute their running statistics, as exporters write those that have none, constants in
    their place, whose update nobody reads. Gives the names of the constants."""
    known, shapes = forward.initializers(), forward.shapes()
    results = {name for node in batch_norms(forward) for name in node.output[1:3]}
    taken = forward.names()
    added: set[str] = set()
    found = []
    from_data = forward.from_data()
    for node in batch_norms(forward):
        if not is_training(node) or len(node.input) < 5 or node.input[0] not in from_data:
            continue
        if all(name in known or name in results for name in node.input[3:5]):
            continue
        channels = (shapes.get(node.input[0]) or [0, 0])[1]
        for index, what, value in ((3, "no_mean", 0.0), (4, "no_variance", 1.0)):
            name = fresh(f"{node.name}/{what}", taken | added)
            forward.set_initializer(name, np.full(channels, value, np.float32))
            node.input[index] = name
            added.add(name)
        found.append(node.name)
    if found:
        forward.note(f"{len(found)} BatchNormalization nodes have no running statistics ({some(found)})")
        forward.remove_dead_nodes()
    return added
