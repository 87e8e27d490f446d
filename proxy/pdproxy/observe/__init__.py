"""What happened, as frozen events, and the observers that get them: metrics and the log. Changes nothing."""
