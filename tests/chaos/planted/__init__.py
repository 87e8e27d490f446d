"""Bugs that are planted into a copy of the package, one at a time, to see whether `pdproxy chaos` finds them."""
