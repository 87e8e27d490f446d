"""The search for inputs that cost too much: CPU time and memory per byte, where a client's or an
engine's bytes are read.
"""
