"""A lab in the terminal: objectives, each checked against what the engine did. Nothing is simulated."""
