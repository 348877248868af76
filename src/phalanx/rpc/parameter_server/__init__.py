"""Parameter servers: a model whose parameters live on other workers, shared out over them, and are trained there."""
