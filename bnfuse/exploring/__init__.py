"""Sweeps over the metaparameters of the zoo: sizes, work, time before and after fusion, and what no point beats."""

from bnfuse.exploring.points import Point
from bnfuse.exploring.presets import PRESETS
from bnfuse.exploring.result import Exploration
from bnfuse.exploring.run import explore

__all__ = ["PRESETS", "Exploration", "Point", "explore"]
