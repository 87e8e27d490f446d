"""The generated pages of docs/reference: what makes them, and the tests that they are current."""
