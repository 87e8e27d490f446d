"""The images of the Dockerfile, built and run, and compose.yaml."""
