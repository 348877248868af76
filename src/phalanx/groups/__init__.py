"""The methods of ``phalanx.group.Group`` beside torch's own.

Begin with ``objects.py`` (objects, turns); ``values.py`` has numbers, tensors and nests of them.
"""
