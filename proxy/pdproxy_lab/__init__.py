"""Tools for operators: what one runs beside the proxy, or before it. They import `pdproxy`, which
imports none of them.
"""
