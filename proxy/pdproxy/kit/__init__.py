"""What every other room may use: errors, identifiers, task ownership. Standard library only."""
