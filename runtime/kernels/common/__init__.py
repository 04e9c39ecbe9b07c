"""What kernels compute, whatever they run on: problems, parameters, geometry, and each formula once."""
