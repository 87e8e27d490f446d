"""One prompt on its engines: which ones, each leg, and what is done where one fails."""
