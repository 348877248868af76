import sys

import phalanx

with phalanx.init() as world:
    print(sys.argv[1:], world.sum(1.0))
