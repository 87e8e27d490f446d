"""The page of the admin listener in a real browser: Chromium."""
