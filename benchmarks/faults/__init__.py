"""Jobs that are struck by a fault, and how soon those whom it concerns know; ``benchmarks/deaths.py`` runs them."""
