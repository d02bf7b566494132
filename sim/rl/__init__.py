"""One step of reinforcement learning: answers are written, scored and trained on, and new weights reach the engine."""
