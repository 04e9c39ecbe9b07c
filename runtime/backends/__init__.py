"""What runs a program: memory, launches and queues of CPUs and GPUs."""
