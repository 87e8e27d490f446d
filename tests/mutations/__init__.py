"""Changes the data path at random places, one at a time, to see whether the nearest tests
notice.
"""
