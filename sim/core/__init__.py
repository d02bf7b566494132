"""The nouns of the simulator: programs, actions, timelines, number formats, files, errors. They import nothing else."""
