"""Estimates of a training iteration's time and memory traffic before any run ([Tsai21]).

workload (layers, tensors)  +  hardware (rate, cache, memory)  ->  estimate
"""
