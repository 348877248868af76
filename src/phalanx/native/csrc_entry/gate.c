/* Entering and leaving a group, as Progress.run() of c10d/progress.py does for its own thread; and recording its calls. */
#include "entry.h"

struct entry_process entry_process;
uint64_t entry_forks;

int entry_is_watched(void)
{
    PyObject *profiling = PyDict_GetItemWithError(entry_process.profiling, entry_process.is_profiling);
    PyObject *in_mode = PyDict_GetItemWithError(entry_process.modes, entry_process.in_mode);
    return profiling != Py_False || in_mode != Py_False; /* also if a flag has gone */
}

int entry_is_seen_by_functions(void)
{
    PyObject *count = PyObject_CallNoArgs(entry_process.function_modes);
    if (!count)
        return -1;
    const long modes = PyLong_AsLong(count);
    Py_DECREF(count);
    return modes < 0 ? -1 : modes > 0;
}

static int give_back(entry *self)
{
    PyObject *released = PyObject_CallNoArgs(self->release);
    Py_XDECREF(released);
    return released ? 0 : -1;
}

int entry_find_site(entry *self, uint32_t *site)
{
    *site = 0;
    return self->recorded ? entry_site_number(&entry_process.codes, site) : 0;
}

int entry_enter(entry *self, uint32_t *site)
{
    if (self->forks != entry_forks || entry_is_watched())
        return 0;
    if (entry_find_site(self, site))
        return -1;
    PyObject *taken = PyObject_CallNoArgs(self->acquire); /* may run signal handlers, and wait for another thread */
    if (!taken)
        return -1;
    Py_DECREF(taken);
    /* A signal handler that ran while the lock was awaited may have forked, and this be the child. */
    if (!*self->busy && PyObject_Size(self->queue) == 0 && self->forks == entry_forks) {
        *self->busy = 1;
        return 1;
    }
    return give_back(self);
}

int entry_leave(entry *self)
{
    PyObject *kind, *value, *trace;
    *self->busy = 0;
    PyErr_Fetch(&kind, &value, &trace);
    const int failed = give_back(self);
    if (kind)
        PyErr_Restore(kind, value, trace);
    return kind || failed ? -1 : 0;
}

uint64_t entry_record(entry *self, uint32_t what, uint64_t nbytes, uint32_t site, int64_t peer)
{
    if (!self->recorded)
        return 0;
    return entry_process.core.record_begin(self->recorded, what, nbytes, site, (int32_t)peer);
}
