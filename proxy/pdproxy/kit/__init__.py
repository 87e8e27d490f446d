"""What every other package may use: errors, identifiers, task ownership. Standard library only."""
