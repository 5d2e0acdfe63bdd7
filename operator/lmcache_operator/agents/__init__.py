"""The operator's end of the link: who connects, what they say, and what they are told."""
