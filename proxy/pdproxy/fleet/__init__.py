"""Engines: the registry of all that is known of them, probes, canaries of tokenizers, and the audit
of KV that never arrived.
"""
