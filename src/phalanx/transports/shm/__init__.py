"""The transport of one host: collectives and messages through one segment of memory that its ranks share.

Begin with ``communicator.py``: a call goes from there into the core (``native/csrc/segment/segment.h`` has the protocol).
``segment.py`` has the ranks find the segment, ``mailbox.py`` the messages, ``explanation.py`` what errors say,
``numbers.py`` what calls of the core take, and ``tuning.py`` the sizes at which algorithms change.
"""
