"""`pdproxy up`: engines on the GPUs of one machine, and the proxy in front of them, in one
command.
"""
