"""What is taken from torch: modules and exported programs as ONNX graphs, and files of weights.

The rest of the package sees ONNX and arrays alone. torch is imported when something here is called.
"""
