"""Programs of their own: run by path with whatever interpreter fits, never imported."""
