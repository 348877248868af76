"""Gradients that follow calls: contexts, the functions at the edges between workers, and the backward passes."""
