"""A zygote that hangs: what a launch finds as its ``sitecustomize``."""

__all__ = ["STUCK"]

# The zygote never learns of the end of a rank, as if it waited in the kernel, and is given up sooner than for users.
STUCK = """
import time
from phalanx.launch import zygote, zygote_watch
zygote._Ranks._reap = lambda ranks: time.sleep(300)
zygote_watch.SILENCE_S = 1.0
"""
