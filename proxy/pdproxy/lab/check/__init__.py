"""`pdproxy check`: will these engines work split apart behind the proxy, and if not, what has to be changed?

`gather` asks the engines, `facts` holds what they said, `rules` turn facts into findings without asking anything, `report` prints
them. A new rule is a function in one file of `rules`.
"""
