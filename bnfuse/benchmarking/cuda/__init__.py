"""What the benchmark does otherwise on a GPU. It needs no TVM and no compiler, but torch for inputs and floors.

step.py       our step on inputs that lie on the GPU, timed by events
limits.py     what the GPU could do: a copy, matrix products
cudnn.py      a network's convolutions alone, by cuDNN
memory.py     peak memory, a process each (that process runs this module)
card.py       what it was measured on
"""
