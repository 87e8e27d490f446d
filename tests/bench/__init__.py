"""The load generator: `pdproxy_lab.bench`."""
