"""The proxy on Kubernetes, without a cluster."""
