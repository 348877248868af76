"""Parameter servers: a model's parameters live on other workers, where an optimizer trains them.

``trainer.py`` is ``rpc.parameters()`` and what it returns; ``server.py`` is the other side, and says which server has
which rows of which parameter. Begin with ``Parameters.step`` and ``Shard.push``.
"""
