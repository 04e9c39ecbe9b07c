"""The version, on which the keys of compiled kernels depend too."""

__version__ = "0.2.0"
