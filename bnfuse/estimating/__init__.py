"""Estimates of a training iteration's time and memory traffic before any run (papers/004).

workload (layers, tensors)  +  hardware (rate, cache, memory)  ->  estimate
"""
