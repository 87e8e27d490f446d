"""Chooses the engines that serve a request. Pure: the time is passed in, and nothing here waits or
sends.
"""
