"""The stream to the operator; opened by a later issue."""
