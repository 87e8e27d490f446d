"""The engine simulator: a fake vLLM that is as strict as the real one, in real time behind HTTP or
in virtual time without it.
"""
