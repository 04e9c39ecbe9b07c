"""onnxruntime as a neighbour in a process of its own: a damaged graph can crash it, or make it ask for all memory.

process.py     our end: starts the process, asks, and says in one line how it ended
child.py       its end: sessions, checkpoints
frames.py      what goes between them: JSON and arrays
library.py     the installed package, or one line that says what is wrong with it
"""
