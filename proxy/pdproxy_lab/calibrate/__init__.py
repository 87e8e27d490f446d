"""Measures an engine and writes its profile (`pdproxy calibrate`)."""
