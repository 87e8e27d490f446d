"""What `.ci/full` has shown: its page."""
