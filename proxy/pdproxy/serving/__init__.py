"""One request's life: admission, exchange, relay, and custody of the KV it leaves behind."""
