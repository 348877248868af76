/* The quick calls: the usual form of each collective, of send and of recv, and nothing else.
 *
 * A call is of the usual form if its tensors are plain (arguments.c), it is synchronous, has no timeout of its own,
 * and may be made here and now (enter_group). Everything else is ENTRY_NOT_ME, and errors of arguments are too: Python
 * finds them again and words them. So what this file does is a subset of c10d/collectives.py, call for call. */
#include "entry.h"

#define NOT_ENTERED(entered) ((entered) < 0 ? NULL : ENTRY_NOT_ME)

/* A call of the core, with the interpreter's lock given up. */
#define UNLOCKED(status, call)                                                                                         \
    do {                                                                                                               \
        PyThreadState *state = PyEval_SaveThread();                                                                    \
        (status) = (call);                                                                                             \
        PyEval_RestoreThread(state);                                                                                   \
    } while (0)

/* The same for a call that is recorded. To begin a record runs no Python, so no signal handler raises between it and
 * the operation. */
#define RECORDED(self, status, what, nbytes, site, peer, call)                                                         \
    do {                                                                                                               \
        const uint64_t ticket = phx_record_begin((self)->recorded, what, nbytes, site, (int32_t)(peer));               \
        UNLOCKED(status, call);                                                                                        \
        phx_record_end(ticket, !is_done(status));                                                                      \
    } while (0)

/* What a record says of an operation: an enum phx_kind, the core's dtype number for copies, its number of the
 * reduction. */
#define WHAT(kind, dtype, op) ((uint32_t)(kind) | (uint32_t)(dtype) << 8 | (uint32_t)(op) << 16)

static int is_done(int status)
{
    return status == PHX_OK || status == PHX_CROSSED;
}

struct entry_process entry_process;
uint64_t entry_forks;

/* Return whether a profiler or a mode of torch's wants to see the calls of this process. */
static int is_watched(void)
{
    PyObject *profiling = PyDict_GetItemWithError(entry_process.profiling, entry_process.is_profiling);
    PyObject *in_mode = PyDict_GetItemWithError(entry_process.modes, entry_process.in_mode);
    return profiling != Py_False || in_mode != Py_False; /* also if a flag has gone */
}

/* Whether a mode for torch's functions is active on this thread: it is to see the call of torch.distributed that a
 * quick call of world's replaces. 1, 0, or -1 with an exception. */
static int is_seen_by_functions(void)
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

static int find_site(entry *self, uint32_t *site)
{
    *site = 0;
    return self->recorded ? entry_site_number(&entry_process.codes, site) : 0;
}

/* Find where the call comes from, and take the group's lock for a call here and now. Returns 1; 0 if the call is not
 * for the entry: the group is closed or inherited, an operation is queued or under way, or somebody watches; -1 with an
 * exception. */
static int enter_group(entry *self, uint32_t *site)
{
    if (self->forks != entry_forks || is_watched())
        return 0;
    if (find_site(self, site))
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

/* Give it back. An exception that is set stays set. Returns -1 with an exception if there is one. */
static int leave_group(entry *self)
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

/* -- collectives --------------------------------------------------------------------------------------------------- */

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
    if (leave_group(self))
        return NULL;
    Py_INCREF(Py_None);
    return Py_None;
}

/* Note a call that the other ranks may not have confirmed when it returns (transports/shm/communicator.py). */
static void note_unheard(entry *self, const char *name, uint32_t site, PyObject *tensor, int op, int64_t root)
{
    PyObject *dtype = PyObject_GetAttr(tensor, entry_process.dtype);
    PyObject *shape = PyObject_GetAttr(tensor, entry_process.shape);
    PyObject *number = op < 0 ? (Py_INCREF(Py_None), Py_None) : PyLong_FromLong(op);
    PyObject *call = Py_BuildValue("(IO(sNNNL))", site, entry_process.text_of_call, name, dtype, shape, number, root);
    if (call)
        (void)PyObject_SetAttr(self->communicator, entry_process.unheard, call);
    Py_XDECREF(call);
}

/* The only tensor of a list, described; 1, 0 or -1 as entry_read(). The list may change while other threads run, so
 * with 1 the caller gets a reference of its own. */
static int read_only_one(PyObject *list, PyObject **object, struct entry_tensor *out)
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
    const int entered = enter_group(self, &site);
    if (entered <= 0)
        return NOT_ENTERED(entered);
    const uint32_t number = op < 0 ? 0 : entry_process.ops[op];
    RECORDED(self, status, WHAT(kind, tensor->copied, number), tensor->nbytes, site, root,
                   call_core(self, kind, tensor, number, (uint32_t)root));
    const int waited = kind == PHX_ALL_REDUCE || (root == self->rank ? kind == PHX_REDUCE
                                                                     : kind == PHX_BROADCAST && self->size <= 2);
    if (is_done(status) && !waited)
        note_unheard(self, NAMES[kind], site, object, op, root);
    return finish(self, status, NAMES[kind], object, op, root);
}

/* allreduce, reduce and broadcast: a list with the tensor, and options. */
PyObject *entry_call_with_one(entry *self, uint32_t kind, PyObject *const *args, Py_ssize_t nargs)
{
    struct entry_tensor tensor;
    PyObject *object;
    int op;
    int64_t root;
    if (nargs != 2 || !entry_usual(kind, args[1], &op, &root))
        return ENTRY_NOT_ME;
    const int plain = read_only_one(args[0], &object, &tensor);
    if (plain <= 0)
        return NOT_ENTERED(plain);
    PyObject *result = call_with(self, kind, object, &tensor, op, root);
    Py_DECREF(object);
    return result;
}

/* sum_in_place: a tensor. */
PyObject *entry_sum(entry *self, uint32_t kind, PyObject *const *args, Py_ssize_t nargs)
{
    struct entry_tensor tensor;
    const int seen = is_seen_by_functions();
    if (seen)
        return seen < 0 ? NULL : PyBool_FromLong(0);
    const int plain = nargs == 1 ? entry_read(&entry_process.tensors, args[0], &tensor) : 0;
    PyObject *result = plain <= 0 ? NOT_ENTERED(plain) : call_with(self, kind, args[0], &tensor, 0, -1);
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

/* all_gather(whole, part, options) and reduce_scatter(part, whole, options). */
PyObject *entry_call_with_both(entry *self, uint32_t kind, PyObject *const *args, Py_ssize_t nargs)
{
    struct entry_tensor of_whole, of_part;
    int op, status;
    int64_t root;
    uint32_t site;
    if (nargs != 3 || !entry_usual(kind, args[2], &op, &root))
        return ENTRY_NOT_ME;
    const int gathers = kind == PHX_ALL_GATHER;
    PyObject *whole = args[gathers ? 0 : 1], *part = args[gathers ? 1 : 0];
    const int plain = read_whole_and_part(self, whole, part, &of_whole, &of_part);
    if (plain <= 0)
        return NOT_ENTERED(plain);
    if (!gathers && (op < 0 || op >= ENTRY_OPS || !(of_part.ops >> op & 1)))
        return ENTRY_NOT_ME;
    const int entered = enter_group(self, &site);
    if (entered <= 0)
        return NOT_ENTERED(entered);
    for (uint32_t rank = 0; rank < self->size; rank++)
        self->pointers[rank] = of_whole.data + rank * of_part.nbytes;
    const uint32_t number = gathers ? 0 : entry_process.ops[op];
    RECORDED(self, status, WHAT(kind, of_part.copied, number), of_part.nbytes, site, -1,
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
    if (nargs != 1 || !entry_usual(kind, args[0], &op, &root))
        return ENTRY_NOT_ME;
    const int entered = enter_group(self, &site);
    if (entered <= 0)
        return NOT_ENTERED(entered);
    RECORDED(self, status, WHAT(kind, 0, 0), 0, site, -1, phx_barrier(self->comm));
    return finish(self, status, "barrier", Py_None, -1, -1);
}

/* -- messages ------------------------------------------------------------------------------------------------------
 *
 * A send that is done at once, and a send or receive whose caller waits for it. They do not take the group's lock: any
 * thread may send and receive beside a collective. The thread that closes the group waits for the threads that are in
 * the mailbox's list `inside` (transports/shm/mailbox.py). */

/* The core's handle of the group if messages can be moved; NULL if not, or with an exception. What it returns is good
 * for as long as this thread keeps the interpreter's lock, or is in the list. */
static phx_comm *open_mailbox(entry *self)
{
    PyObject *ended = PyObject_GetAttr(self->mailbox, entry_process.ended);
    PyObject *comm = ended ? PyObject_GetAttr(self->mailbox, entry_process.comm) : NULL;
    const int open = ended == Py_False && comm;
    phx_comm *found = open ? PyLong_AsVoidPtr(comm) : NULL;
    Py_XDECREF(ended);
    Py_XDECREF(comm);
    return found;
}

static int enter_mailbox(entry *self)
{
    return PyList_Append(self->inside, Py_None);
}

/* An exception that is set stays set. */
static void leave_mailbox(entry *self)
{
    PyObject *kind, *value, *trace;
    PyErr_Fetch(&kind, &value, &trace);
    const Py_ssize_t last = PyList_Size(self->inside) - 1;
    if (last < 0 || PyList_SetSlice(self->inside, last, last + 1, NULL))
        PyErr_Clear();
    PyErr_Restore(kind, value, trace);
}

/* A message: the other end's rank, and the tag. */
struct ends {
    int64_t rank, tag;
};

/* Return whether messages to and from a rank of the group may be moved here. */
static int may_move(entry *self, const struct ends *ends)
{
    return ends->rank >= 0 && ends->rank < self->size && self->forks == entry_forks && !is_watched();
}

/* Send a message of up to 64 KiB at once: it takes some microseconds, so the interpreter's lock is kept. It is recorded
 * when it has been sent, because one that is not is recorded by who sends it. */
static int send_now(entry *self, phx_comm *comm, const struct entry_tensor *tensor, const struct phx_end *end,
                    uint32_t peer, uint32_t tag)
{
    const int sent = phx_send_now(comm, tensor->data, end, peer, tag);
    if (sent)
        phx_record_end(phx_record_begin(self->recorded, WHAT(PHX_SEND, tensor->copied, 0), tensor->nbytes, end->site,
                                        (int32_t)peer), 0);
    return sent;
}

/* Start a message and wait for it; NULL in `message` if the core refuses it, or PHX_SENT. */
static int start_and_wait(phx_comm *comm, uint32_t kind, const struct entry_tensor *tensor, const struct phx_end *end,
                          uint32_t peer, uint32_t tag, phx_message **message)
{
    *message = kind == PHX_SEND ? phx_send(comm, tensor->data, end, peer, tag)
                                : phx_recv(comm, tensor->data, end, peer, tag);
    if (*message == PHX_SENT)
        return PHX_OK;
    return *message ? phx_message_wait(comm, *message, 0) : PHX_BAD_ARGUMENT;
}

/* The same, recorded: 1, 0 and -1 as move(). A message that fails is Python's: it finds the same status, raises the
 * error, and gives the message back. */
static int await(entry *self, phx_comm *comm, uint32_t kind, PyObject *object, const struct entry_tensor *tensor,
                 const struct phx_end *end, uint32_t peer, uint32_t tag)
{
    phx_message *message;
    int status;
    /* A rank of another host may have to be dialled, and a sender there may have gone: then Python finds out. */
    if (!phx_messages_met(comm, peer, kind == PHX_RECV))
        return 0;
    if (enter_mailbox(self))
        return -1;
    RECORDED(self, status, WHAT(kind, tensor->copied, 0), tensor->nbytes, end->site, peer,
             start_and_wait(comm, kind, tensor, end, peer, tag, &message));
    if (message && status) {
        const unsigned long long handle = (uintptr_t)message;
        PyObject *raised = PyObject_CallFunction(self->fail_message, "KOsI", handle, object,
                                                 kind == PHX_SEND ? "send to" : "recv from", peer);
        if (raised)
            PyErr_SetString(PyExc_SystemError, "the core reported an error that has no exception");
        Py_XDECREF(raised);
    } else if (message && message != PHX_SENT) {
        phx_message_free(comm, message);
    }
    leave_mailbox(self);
    return !message ? 0 : status ? -1 : 1;
}

/* Returns 1 if the message has been moved; 0 if it is for Python; -1 with an exception. The caller holds the tensor.
 * `waited`: nothing can happen on this thread before the message is waited for. */
static int move(entry *self, uint32_t kind, PyObject *object, const struct entry_tensor *tensor, const struct ends *ends,
                int waited)
{
    const uint32_t peer = (uint32_t)ends->rank, tag = (uint32_t)ends->tag;
    uint32_t site;
    if (find_site(self, &site))
        return -1;
    phx_comm *comm = open_mailbox(self);
    if (!comm)
        return PyErr_Occurred() ? -1 : 0;
    const struct phx_end end = {tensor->nbytes, tensor->copied, site};
    if (kind == PHX_SEND && send_now(self, comm, tensor, &end, peer, tag))
        return 1;
    return waited ? await(self, comm, kind, object, tensor, &end, peer, tag) : 0;
}

/* A rank or a tag: 1, or 0 if it is not a plain integer, or a large one. */
static int read_number(PyObject *object, int64_t *number)
{
    if (!PyLong_CheckExact(object))
        return 0;
    *number = PyLong_AsLongLong(object);
    if (*number != -1 || !PyErr_Occurred())
        return 1;
    PyErr_Clear();
    return 0;
}

static int read_ends(PyObject *const *args, struct ends *ends)
{
    return read_number(args[0], &ends->rank) && read_number(args[1], &ends->tag);
}

/* The arguments (tensor, peer, tag) of a message to or from another rank: 1, 0 or -1 as entry_read(). */
static int read_message(entry *self, PyObject *const *args, Py_ssize_t nargs, struct entry_tensor *tensor,
                        struct ends *ends)
{
    if (nargs != 3 || !read_ends(args + 1, ends) || ends->rank == self->rank || !may_move(self, ends))
        return 0;
    const int seen = is_seen_by_functions();
    return seen ? (seen < 0 ? -1 : 0) : entry_read(&entry_process.tensors, args[0], tensor);
}

/* send_now(tensor, dst, tag) and recv_now(tensor, src, tag): whether it has been moved. */
PyObject *entry_move_now(entry *self, uint32_t kind, PyObject *const *args, Py_ssize_t nargs)
{
    struct entry_tensor tensor;
    struct ends ends;
    int done = read_message(self, args, nargs, &tensor, &ends);
    if (done == 1)
        done = move(self, kind, args[0], &tensor, &ends, 1);
    return done == 1 ? PyBool_FromLong(1) : NOT_ENTERED(done);
}

/* The group's send([tensor], dst, tag) and recv([tensor], src, tag); the latter only if torch's recv() is what calls
 * it, since then nothing can happen before the wait. */
PyObject *entry_move_listed(entry *self, uint32_t kind, PyObject *const *args, Py_ssize_t nargs)
{
    struct entry_tensor tensor;
    PyObject *object;
    struct ends ends;
    if (nargs != 3 || !read_ends(args + 1, &ends) || !may_move(self, &ends))
        return ENTRY_NOT_ME;
    /* torch's function that waits for the message starts it in a helper, whose frame is the innermost one. */
    const int waited = entry_is_called_by(kind == PHX_SEND ? entry_process.send_code : entry_process.recv_code);
    if (!waited && kind == PHX_RECV)
        return ENTRY_NOT_ME;
    int done = read_only_one(args[0], &object, &tensor);
    if (done != 1)
        return NOT_ENTERED(done);
    done = move(self, kind, object, &tensor, &ends, waited);
    Py_DECREF(object);
    if (done != 1)
        return NOT_ENTERED(done);
    if (!waited) /* the caller may ask the handle for the tensors */
        return PyObject_CallFunctionObjArgs(entry_process.done_work, args[0], NULL);
    Py_INCREF(entry_process.done);
    return entry_process.done;
}
