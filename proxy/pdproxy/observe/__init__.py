"""What happened, as frozen events; who wants to know subscribes. Changes nothing."""
