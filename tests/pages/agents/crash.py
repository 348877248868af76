import phalanx

with phalanx.init() as world:
    world.barrier()
    if world.rank == 1:
        print("reading")
        raise ValueError("bad batch")
    world.barrier()
