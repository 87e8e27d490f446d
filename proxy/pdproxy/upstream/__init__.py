"""The legs to engines. Socket errors become `EngineError`s here, once."""
