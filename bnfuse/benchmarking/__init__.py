"""How long a training step takes and how much memory: our levels beside each other and beside other runtimes.

choices.py      what can be asked for: levels, baselines
times.py        the times of a step, and what they come to
candidates.py   our compiled step, onnxruntime; torch's are in bnfuse.baselines
run.py          everything in turns in one process: `run_benchmark`
idle.py         waiting until nobody else computes, and until a candidate's threads sleep
memory.py       peak memory, a process each (that process runs this module)
compiling.py    compile time with an empty and a filled cache, a process each
profiles.py     a step kernel by kernel; limits.py has what the machine could do
results.py      tables and JSON; plot.py the picture
machine.py      what it was measured on
"""
