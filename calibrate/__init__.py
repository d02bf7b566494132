"""Measurements of the machine at hand and real runs of the parallel schemes. The only importer of torch."""
