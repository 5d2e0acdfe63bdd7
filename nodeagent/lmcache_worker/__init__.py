"""The worker side of the wire: a small client now, the engine adapter later."""
