"""The bugs: a module each, with its `BUG`. None of them is in the product: `tests.chaos.planted.bug` applies them to a copy."""
