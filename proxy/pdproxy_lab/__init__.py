"""The operator's instruments: what one runs beside the proxy, or before it."""
