"""How well a profile predicts what was measured: the same load on virtual engines, cell by cell."""
