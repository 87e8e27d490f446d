"""One module per generating route: see `wire.route_form`."""
