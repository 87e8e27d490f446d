"""Serves one prompt: chooses the engines, sends them the legs, and recovers from failures."""
