"""The page of the admin listener in a real browser: Debian's Chromium (`.ci/full page`)."""
