"""`pdproxy check`: whether engines will work with prefill and decode split, and what has to be
changed if not.

`gather` sends requests to the engines, `facts` holds the results, `rules` turn facts into findings
without any request, `report` prints them. A new rule is a function in one file of `rules`.
"""
