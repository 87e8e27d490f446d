"""`pdproxy check --security`: what the settings leave open. Nothing is asked of engines, and
nothing is changed.
"""
