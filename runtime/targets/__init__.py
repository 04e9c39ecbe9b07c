"""What kernels can be made for: CPUs as LLVM knows them, architectures of GPUs."""
