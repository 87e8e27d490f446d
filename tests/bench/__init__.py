"""The load generator: `pdproxy.bench`."""
