"""From a training graph to a program: operators become launches of kernels."""
