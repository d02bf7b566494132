"""NeMo RL's configs as scenarios."""
