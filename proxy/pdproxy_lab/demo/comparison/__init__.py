"""The demo's comparison: the same requests to split engines and to as many plain ones."""
