"""The wire of LMCache's multiprocess mode: operations, messages, codec."""
