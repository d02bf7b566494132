"""The model as programs: what one rank computes, communicates and keeps for one micro-batch."""
