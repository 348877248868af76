// Loaded before torch, it counts how often torch's autograd engine is destroyed in this process, and makes that take
// long enough for every thread that wants to destroy it as well.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

#define ENGINE_DESTRUCTOR _ZN5torch8autograd6EngineD2Ev
#define NAME_OF(symbol) #symbol
#define NAME(symbol) NAME_OF(symbol)

static atomic_int ends;

int engine_ends(void) { return ends; }

void ENGINE_DESTRUCTOR(void *engine) {
  atomic_fetch_add(&ends, 1);
  usleep(300000);
  // torch's libraries are not among those that RTLD_NEXT looks through.
  void *torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
  void (*destroy)(void *) = torch ? (void (*)(void *))dlsym(torch, NAME(ENGINE_DESTRUCTOR)) : NULL;
  if (!destroy) abort();
  destroy(engine);
}
