"""Running a compiled step on an NVIDIA GPU through the driver. Nothing here imports TVM.

container.py     a kernel's code: its device kernels and how to launch them
arch.py          architectures that code can be made for
driver.py        the driver's calls that are used, typed, their errors in one line
memory.py        the regions of a program on the device
dlpack.py        arrays of other libraries, both ways, without a copy
array.py         a result on the device
dependencies.py  which launch has to wait for which
calls.py         launches with their arguments filled in
graph.py         launches as a CUDA graph
runner.py        the phases of a program
"""
