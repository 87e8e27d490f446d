"""The same request to the proxy over split engines and to one plain engine: generated widely,
compared to the byte.
"""
