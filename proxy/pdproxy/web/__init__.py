"""The way in: the data path's protocol class, and the FastAPI application for everything else."""
