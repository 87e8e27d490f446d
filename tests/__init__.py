"""Tests: `unit` (one module at a time), `proxy` (the whole proxy, fake engines), `engines` (real
engines).
"""
