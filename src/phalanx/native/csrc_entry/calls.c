/* The quick calls: the usual form of each collective, and nothing else.
 *
 * A call is of the usual form if its tensors are plain (arguments.c), it is synchronous, has no timeout of its own,
 * and may be made here and now (entry_enter). Everything else is ENTRY_NOT_ME, and errors of arguments are too: Python
 * finds them again and words them. So what this file does is a subset of c10d/process_group.py, call for call. */
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

/* Entering and leaving a group is what Progress.run() of c10d/progress.py does for its own thread. */
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
    if (!PyErr_Occurred())
        return give_back(self);
    PyErr_Fetch(&kind, &value, &trace);
    (void)give_back(self);
    PyErr_Restore(kind, value, trace);
    return -1;
}

uint64_t entry_record(entry *self, uint32_t what, uint64_t nbytes, uint32_t site, int64_t peer)
{
    if (!self->recorded)
        return 0;
    return phx_record_begin(self->recorded, what, nbytes, site, (int32_t)peer);
}

/* -- the calls ----------------------------------------------------------------------------------------------------- */

static int is_done(int status)
{
    return status == PHX_OK || status == PHX_CROSSED;
}

/* The end of a call: give the group back, or raise the error for the core's status. */
static PyObject *finish(entry *self, int status, const char *name, PyObject *tensor, int op, int64_t root)
{
    if (status && !PyErr_Occurred()) { /* an exception is a signal handler's, raised after a call that is done */
        PyObject *raised = PyObject_CallFunction(
            self->fail, "isONN", status, name, tensor, op < 0 ? (Py_INCREF(Py_None), Py_None) : PyLong_FromLong(op),
            root < 0 ? (Py_INCREF(Py_None), Py_None) : PyLong_FromLongLong(root));
        if (raised) {
            Py_DECREF(raised);
            if (!is_done(status))
                PyErr_SetString(PyExc_SystemError, "the core reported an error that has no exception");
        }
    }
    if (entry_leave(self))
        return NULL;
    Py_INCREF(Py_None);
    return Py_None;
}

/* Record a call that the other ranks may not have confirmed when it returns. */
static int note_unheard(entry *self, const char *name, uint32_t site, PyObject *tensor, int op, int64_t root)
{
    PyObject *dtype = PyObject_GetAttrString(tensor, "dtype"), *shape = PyObject_GetAttr(tensor, entry_process.tensors.shape);
    PyObject *kind = dtype && shape ? PyTuple_Pack(2, dtype, shape) : NULL, *old = self->last.tensor_kind;
    Py_XDECREF(dtype);
    Py_XDECREF(shape);
    if (!kind)
        return -1;
    self->last.name = name;
    self->last.site = site;
    self->last.tensor_kind = kind;
    self->last.op = op;
    self->last.root = root;
    Py_XDECREF(old);
    return self->explain ? PyObject_SetAttr(self->communicator, entry_process.unheard, self->explain) : 0;
}

int entry_read_only_one(PyObject *list, PyObject **object, struct entry_tensor *out)
{
    if (!PyList_CheckExact(list) || PyList_Size(list) != 1)
        return 0;
    *object = PyList_GetItem(list, 0);
    Py_INCREF(*object);
    const int plain = entry_read(&entry_process.tensors, *object, out);
    if (plain != 1)
        Py_DECREF(*object);
    return plain;
}

/* Enter with a tensor, which the caller holds: another thread may run until the lock is taken, and resize it. */
static int enter_with(entry *self, PyObject *object, const struct entry_tensor *tensor, uint32_t *site)
{
    const int entered = entry_enter(self, site);
    if (entered > 0 && !entry_unchanged(&entry_process.tensors, object, tensor))
        return entry_leave(self) ? -1 : 0;
    return entered;
}

/* Whether the options of a call are the usual ones (entry_usual()). */
static int is_usual(uint32_t kind, PyObject *options, int *op, int64_t *root)
{
    static const enum entry_option_class CLASSES[] = {
        [PHX_ALL_REDUCE] = ENTRY_ALL_REDUCE_OPTIONS, [PHX_REDUCE] = ENTRY_REDUCE_OPTIONS,
        [PHX_BROADCAST] = ENTRY_BROADCAST_OPTIONS,   [PHX_REDUCE_SCATTER] = ENTRY_REDUCE_SCATTER_OPTIONS,
        [PHX_ALL_GATHER] = ENTRY_ALL_GATHER_OPTIONS, [PHX_BARRIER] = ENTRY_BARRIER_OPTIONS};
    return entry_usual(&entry_process.options[CLASSES[kind]], options, op, root);
}

static int call_core(entry *self, uint32_t kind, const struct entry_tensor *tensor, uint32_t op, uint32_t root)
{
    switch (kind) {
    case PHX_ALL_REDUCE:
        return phx_all_reduce(self->comm, tensor->data, tensor->data, tensor->count, tensor->reduced, op,
                              tensor->shape_word);
    case PHX_REDUCE:
        return phx_reduce(self->comm, tensor->data, tensor->data, tensor->count, tensor->reduced, op, root,
                          tensor->shape_word);
    default:
        return phx_broadcast(self->comm, tensor->data, tensor->nbytes, tensor->copied, root, tensor->shape_word);
    }
}

/* A call with one tensor, which the caller holds. `op` is -1 without an operation, `root` without a root. */
static PyObject *call_with(entry *self, uint32_t kind, PyObject *object, const struct entry_tensor *tensor, int op,
                           int64_t root)
{
    static const char *const NAMES[] = {
        [PHX_ALL_REDUCE] = "all_reduce", [PHX_REDUCE] = "reduce", [PHX_BROADCAST] = "broadcast"};
    int status;
    uint32_t site;
    if ((kind != PHX_BROADCAST && (op < 0 || op >= ENTRY_OPS || !(tensor->ops >> op & 1))) ||
        (kind != PHX_ALL_REDUCE && (root < 0 || root >= self->size)))
        return ENTRY_NOT_ME;
    const int entered = enter_with(self, object, tensor, &site);
    if (entered <= 0)
        return ENTRY_NOT_ENTERED(entered);
    const uint32_t number = op < 0 ? 0 : entry_process.ops[op];
    ENTRY_RECORDED(self, status, ENTRY_WHAT(kind, tensor->copied, number), tensor->nbytes, site, root,
                   call_core(self, kind, tensor, number, (uint32_t)root));
    const int waited = kind == PHX_ALL_REDUCE || (root == self->rank ? kind == PHX_REDUCE
                                                                     : kind == PHX_BROADCAST && self->size <= 2);
    if (is_done(status) && !waited)
        (void)note_unheard(self, NAMES[kind], site, object, op, root);
    return finish(self, status, NAMES[kind], object, op, root);
}

/* allreduce, reduce and broadcast: a list with the tensor, and options. */
PyObject *entry_call_with_one(entry *self, uint32_t kind, PyObject *const *args, Py_ssize_t nargs)
{
    struct entry_tensor tensor;
    PyObject *object;
    int op;
    int64_t root;
    if (nargs != 2 || !is_usual(kind, args[1], &op, &root))
        return ENTRY_NOT_ME;
    const int plain = entry_read_only_one(args[0], &object, &tensor);
    if (plain <= 0)
        return ENTRY_NOT_ENTERED(plain);
    PyObject *result = call_with(self, kind, object, &tensor, op, root);
    Py_DECREF(object);
    return result;
}

/* sum_in_place: a tensor. */
PyObject *entry_sum(entry *self, uint32_t kind, PyObject *const *args, Py_ssize_t nargs)
{
    struct entry_tensor tensor;
    const int seen = entry_is_seen_by_functions();
    if (seen)
        return seen < 0 ? NULL : PyBool_FromLong(0);
    const int plain = nargs == 1 ? entry_read(&entry_process.tensors, args[0], &tensor) : 0;
    PyObject *result = plain <= 0 ? ENTRY_NOT_ENTERED(plain) : call_with(self, kind, args[0], &tensor, 0, -1);
    if (result != Py_None)
        return result;
    Py_DECREF(result);
    return PyBool_FromLong(1); /* the method in Python tells whether it did anything */
}

/* One tensor with a part for each rank, and one that is a part: 1, 0 or -1 as entry_read(). */
static int read_whole_and_part(entry *self, PyObject *whole, PyObject *part, struct entry_tensor *of_whole,
                               struct entry_tensor *of_part)
{
    int plain = entry_read(&entry_process.tensors, whole, of_whole);
    if (plain == 1)
        plain = entry_read(&entry_process.tensors, part, of_part);
    if (plain != 1)
        return plain;
    if (of_whole->copied != of_part->copied || of_whole->count != of_part->count * self->size)
        return 0;
    const char *start = of_whole->data, *at = of_part->data;
    return at >= start + of_whole->nbytes || at + of_part->nbytes <= start || at == start + self->rank * of_part->nbytes;
}

/* Enter with both, which the caller holds, and fill in the addresses of the parts. */
static int enter_with_both(entry *self, PyObject *whole, PyObject *part, const struct entry_tensor *of_whole,
                           const struct entry_tensor *of_part, uint32_t *site)
{
    const int entered = enter_with(self, whole, of_whole, site);
    if (entered <= 0)
        return entered;
    if (!entry_unchanged(&entry_process.tensors, part, of_part))
        return entry_leave(self) ? -1 : 0;
    for (uint32_t rank = 0; rank < self->size; rank++)
        self->pointers[rank] = of_whole->data + rank * of_part->nbytes;
    return 1;
}

/* all_gather(whole, part, options) and reduce_scatter(part, whole, options). */
PyObject *entry_call_with_both(entry *self, uint32_t kind, PyObject *const *args, Py_ssize_t nargs)
{
    struct entry_tensor of_whole, of_part;
    int op, status;
    int64_t root;
    uint32_t site;
    if (nargs != 3 || !is_usual(kind, args[2], &op, &root))
        return ENTRY_NOT_ME;
    const int gathers = kind == PHX_ALL_GATHER;
    PyObject *whole = args[gathers ? 0 : 1], *part = args[gathers ? 1 : 0];
    const int plain = read_whole_and_part(self, whole, part, &of_whole, &of_part);
    if (plain <= 0)
        return ENTRY_NOT_ENTERED(plain);
    if (!gathers && (op < 0 || op >= ENTRY_OPS || !(of_part.ops >> op & 1)))
        return ENTRY_NOT_ME;
    const int entered = enter_with_both(self, whole, part, &of_whole, &of_part, &site);
    if (entered <= 0)
        return ENTRY_NOT_ENTERED(entered);
    const uint32_t number = gathers ? 0 : entry_process.ops[op];
    ENTRY_RECORDED(self, status, ENTRY_WHAT(kind, of_part.copied, number), of_part.nbytes, site, -1,
                   gathers ? phx_all_gather(self->comm, of_part.data, self->pointers, of_part.nbytes, of_part.copied,
                                            of_part.shape_word)
                           : phx_reduce_scatter(self->comm, (const void *const *)self->pointers, of_part.data,
                                                of_part.count, of_part.reduced, number, of_part.shape_word));
    return finish(self, status, gathers ? "all_gather" : "reduce_scatter", part, op, -1);
}

PyObject *entry_barrier(entry *self, uint32_t kind, PyObject *const *args, Py_ssize_t nargs)
{
    int op, status;
    int64_t root;
    uint32_t site;
    if (nargs != 1 || !is_usual(kind, args[0], &op, &root))
        return ENTRY_NOT_ME;
    const int entered = entry_enter(self, &site);
    if (entered <= 0)
        return ENTRY_NOT_ENTERED(entered);
    ENTRY_RECORDED(self, status, ENTRY_WHAT(kind, 0, 0), 0, site, -1, phx_barrier(self->comm));
    return finish(self, status, "barrier", Py_None, -1, -1);
}
