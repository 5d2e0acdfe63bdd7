"""The stream to the operator: opened by the agent, needed by nothing else in it."""
