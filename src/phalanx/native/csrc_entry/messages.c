/* The quick messages: a send that is done at once, and a receive whose caller waits for it.
 *
 * Messages do not take the group's lock: any thread may send and receive beside a collective. The thread that closes
 * the group waits for the threads that are in the mailbox's list `inside` (transports/shm/mailbox.py). */
#include "entry.h"

#define INSIDE_PYTHON 4096 /* bytes that are copied so fast that giving up the interpreter's lock would take longer */

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

static int enter(entry *self)
{
    return PyList_Append(self->inside, Py_None);
}

/* An exception that is set stays set. */
static void leave(entry *self)
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

/* Whether messages to and from a rank of the group may be moved here. */
static int may_move(entry *self, const struct ends *ends)
{
    return ends->rank >= 0 && ends->rank < self->size && self->forks == entry_forks && !entry_is_watched();
}

static int record_sent(entry *self, const struct entry_tensor *tensor, uint32_t site, int64_t rank, int sent)
{
    const uint32_t what = ENTRY_WHAT(PHX_SEND, tensor->copied, 0);
    if (sent == 1)
        phx_record_end(entry_record(self, what, tensor->nbytes, site, rank), 0);
    return sent;
}

/* Returns 1 if the message has been sent; 0 if it is for Python; -1 with an exception. The caller holds the tensor.
 *
 * It is recorded when it has been sent, because one that is not is for Python, which records it. */
static int send_now(entry *self, PyObject *object, const struct entry_tensor *tensor, const struct ends *ends)
{
    const uint32_t peer = (uint32_t)ends->rank, tag = (uint32_t)ends->tag;
    uint32_t site;
    int sent;
    if (entry_find_site(self, &site))
        return -1;
    phx_comm *comm = open_mailbox(self);
    if (!comm)
        return PyErr_Occurred() ? -1 : 0;
    if (!entry_unchanged(&entry_process.tensors, object, tensor))
        return 0;
    const struct phx_end end = {tensor->nbytes, tensor->copied, site};
    if (tensor->nbytes <= INSIDE_PYTHON)
        return record_sent(self, tensor, site, ends->rank,
                           phx_send_now(comm, tensor->data, &end, peer, tag));
    if (enter(self))
        return -1;
    ENTRY_UNLOCKED(sent, phx_send_now(comm, tensor->data, &end, peer, tag));
    leave(self);
    return record_sent(self, tensor, site, ends->rank, sent);
}

/* Receive, and wait for it. Returns 1 if the message has been received; 0 if it is for Python; -1 with an exception.
 * The caller holds the tensor. */
static int receive(entry *self, PyObject *object, const struct entry_tensor *tensor, const struct ends *ends)
{
    const uint32_t peer = (uint32_t)ends->rank, tag = (uint32_t)ends->tag;
    int status = PHX_OK, received = 0;
    uint32_t site;
    if (entry_find_site(self, &site))
        return -1;
    phx_comm *comm = open_mailbox(self);
    if (!comm)
        return PyErr_Occurred() ? -1 : 0;
    /* Who waits for a rank of another host that has never sent has to find out whether it is there at all. */
    if (!entry_unchanged(&entry_process.tensors, object, tensor) || !phx_messages_met(comm, peer))
        return 0;
    if (enter(self))
        return -1;
    const struct phx_end end = {tensor->nbytes, tensor->copied, site};
    phx_message *message = phx_recv(comm, tensor->data, &end, peer, tag);
    if (message)
        ENTRY_RECORDED(self, status, ENTRY_WHAT(PHX_RECV, tensor->copied, 0), tensor->nbytes, site,
                       ends->rank,
                       phx_message_wait(comm, message, 0));
    if (message && !status) {
        received = 1;
        phx_message_free(comm, message);
    } else if (message) {
        /* The message is Python's now: it finds the same status, raises the error for it, and gives the message back.
         */
        const unsigned long long handle = (uintptr_t)message;
        PyObject *raised = PyObject_CallFunction(self->fail_message, "KOI", handle, object, peer);
        if (raised) {
            Py_DECREF(raised);
            PyErr_SetString(PyExc_SystemError, "the core reported an error that has no exception");
        }
        received = -1;
    }
    leave(self);
    return received;
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
static int read_message(entry *self, PyObject *const *args, Py_ssize_t nargs, struct entry_tensor *tensor, struct ends *ends)
{
    if (nargs != 3 || !read_ends(args + 1, ends) || ends->rank == self->rank || !may_move(self, ends))
        return 0;
    const int seen = entry_is_seen_by_functions();
    return seen ? (seen < 0 ? -1 : 0) : entry_read(&entry_process.tensors, args[0], tensor);
}

/* send_now(tensor, dst, tag) and recv_now(tensor, src, tag): whether it has been moved. */
PyObject *entry_move_now(entry *self, uint32_t kind, PyObject *const *args, Py_ssize_t nargs)
{
    struct entry_tensor tensor;
    struct ends ends;
    int done = read_message(self, args, nargs, &tensor, &ends);
    if (done == 1)
        done = (kind == PHX_SEND ? send_now : receive)(self, args[0], &tensor, &ends);
    return done == 1 ? PyBool_FromLong(1) : ENTRY_NOT_ENTERED(done);
}

/* Whether the caller's caller is `waits`, which is torch's function that waits for the message that its helper starts.
 */
static int is_called_by(PyObject *waits)
{
    PyObject *helper = (PyObject *)PyEval_GetFrame(); /* borrowed */
    PyObject *caller = helper ? entry_caller_of(&entry_process.codes, helper) : NULL;
    if (!caller) {
        PyErr_Clear();
        return 0;
    }
    PyObject *code = (PyObject *)PyFrame_GetCode((PyFrameObject *)caller);
    Py_DECREF(code);
    Py_DECREF(caller);
    return code == waits;
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
    const int waited = is_called_by(kind == PHX_SEND ? entry_process.send_code : entry_process.recv_code);
    if (!waited && kind == PHX_RECV)
        return ENTRY_NOT_ME;
    int done = entry_read_only_one(args[0], &object, &tensor);
    if (done != 1)
        return ENTRY_NOT_ENTERED(done);
    done = (kind == PHX_SEND ? send_now : receive)(self, object, &tensor, &ends);
    Py_DECREF(object);
    if (done != 1)
        return ENTRY_NOT_ENTERED(done);
    if (!waited) /* the caller may ask the handle for the tensors */
        return PyObject_CallFunctionObjArgs(entry_process.done_work, args[0], NULL);
    Py_INCREF(entry_process.done);
    return entry_process.done;
}
