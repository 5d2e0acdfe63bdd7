"""`make demo`: real workers on a real agent, one killed, one frozen; every claim is checked."""
