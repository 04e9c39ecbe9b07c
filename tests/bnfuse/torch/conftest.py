"""One fused network for many tests: copies of it share its programs, and have parameters of their own."""

from __future__ import annotations

import copy

import pytest


@pytest.fixture(scope="session")
def first():
    """The small network as it was given, and fused."""
    import torch
    from fused_networks import images, made

    import bnfuse.torch

    torch.set_num_threads(1)
    module = made()
    return module, bnfuse.torch.fuse(module, images())


@pytest.fixture
def fused(first):
    """A fused network that no other test has trained."""
    from fused_networks import made

    double = copy.deepcopy(first[1])
    double.load_state_dict(made().state_dict())
    return double.train()
