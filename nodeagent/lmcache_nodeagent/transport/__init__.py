"""ZeroMQ: the ROUTER thread, connections, and the pools that run requests."""
