"""Connections and requests to engines. Socket errors become `EngineError`s here, once."""
