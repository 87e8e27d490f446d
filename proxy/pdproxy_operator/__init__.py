"""The Kubernetes operator: engines and proxies from two kinds of resources, PDRuntime and PDProxy.

It imports `pdproxy`, and `pdproxy` never imports it.
"""
