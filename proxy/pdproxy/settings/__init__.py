"""What an operator configures: one typed tree, read from flags, environment and a YAML file."""
