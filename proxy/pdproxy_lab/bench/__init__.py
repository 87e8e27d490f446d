"""Measures servers under an open-loop load: `pdproxy bench`. Imports `kit` and `wire` alone."""
