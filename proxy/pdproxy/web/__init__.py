"""Where clients connect: the data path's protocol class, and the FastAPI application for everything
else.
"""
