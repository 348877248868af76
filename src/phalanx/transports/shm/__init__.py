"""The transport of one host: collectives and messages through one segment of memory that its ranks share.

Begin with ``communicator.py``: a call goes from there into the core, whose protocol is in ``csrc/segment/segment.h``.
``segment.py`` has the ranks find the segment, ``mailbox.py`` the messages, ``explanation.py`` what errors say,
``tuning.py`` the sizes at which algorithms change.
"""
