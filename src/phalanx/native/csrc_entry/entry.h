/* The entry of one group: what its quick calls need, and whether one may be made now. */
#ifndef PHALANX_ENTRY_ENTRY_H
#define PHALANX_ENTRY_ENTRY_H

#include "options.h"
#include "phalanx.h"
#include "site.h"
#include "tensor.h"

/* The functions of the core, by their addresses, since the core is loaded by ctypes and not linked to. */
struct entry_core {
    __typeof__(&phx_all_reduce) all_reduce;
    __typeof__(&phx_reduce) reduce;
    __typeof__(&phx_reduce_scatter) reduce_scatter;
    __typeof__(&phx_broadcast) broadcast;
    __typeof__(&phx_all_gather) all_gather;
    __typeof__(&phx_barrier) barrier;
    __typeof__(&phx_send_now) send_now;
    __typeof__(&phx_recv) recv;
    __typeof__(&phx_messages_met) messages_met;
    __typeof__(&phx_message_wait) message_wait;
    __typeof__(&phx_message_free) message_free;
    __typeof__(&phx_record_begin) record_begin;
    __typeof__(&phx_record_end) record_end;
};

enum entry_option_class {
    ENTRY_ALL_REDUCE_OPTIONS,
    ENTRY_REDUCE_OPTIONS,
    ENTRY_REDUCE_SCATTER_OPTIONS,
    ENTRY_BROADCAST_OPTIONS,
    ENTRY_ALL_GATHER_OPTIONS,
    ENTRY_BARRIER_OPTIONS,
    ENTRY_OPTION_CLASSES
};

#define ENTRY_OPS 16

/* What is the same for all groups; filled in by setup(), once, before any group has an entry. */
struct entry_process {
    struct entry_core core;
    struct entry_tensors tensors;
    struct entry_codes codes;
    struct entry_options options[ENTRY_OPTION_CLASSES];
    uint32_t ops[ENTRY_OPS];        /* the core's number of each operation of torch's */
    PyObject *profiling, *modes;    /* the dictionaries with the flags that say whether somebody watches calls */
    PyObject *send_code, *recv_code; /* of torch's functions that wait for the message */
    PyObject *function_modes;        /* counts this thread's modes for torch's functions */
    PyObject *done_work, *done;     /* the class of handles of messages that are done, and one for nobody to keep */
    PyObject *is_profiling, *in_mode, *busy, *unheard, *ended, *comm; /* interned names */
};

/* The call of a group that other ranks may not have confirmed (transports/shm/communicator.py says which these are). */
struct entry_unheard {
    struct entry_site site;
    const char *name;
    PyObject *tensor_kind; /* (dtype, shape) */
    int op;
    int64_t root;
};

/* One group's. The interpreter's lock guards all of it, except that `pointers` belongs to the holder of the group's own
 * lock, as the core's handle does: a call of the core is made by that holder only, with the interpreter's lock given up.
 * The thread that closes the group leaves something in its queue for ever, under the group's lock, before it closes the
 * core's handle; so a call that finds the queue empty under that lock cannot meet a closed handle. In a forked child,
 * whose groups are closed but which has the lock and the queue of its parent here, `forks` differs from the count. */
typedef struct {
    PyObject ob_base;
    phx_comm *comm;
    uint64_t forks;
    uint32_t rank, size;
    PyObject *group;            /* a weak reference: the group holds this entry */
    PyObject *progress, *queue; /* c10d/progress.py */
    PyObject *acquire, *release;
    PyObject *fail;         /* raises the error for a status */
    PyObject *mailbox, *inside, *fail_message; /* transports/shm/mailbox.py; raises the error for a message */
    PyObject *communicator; /* its `_unheard` gets `explain` when `last` is the latest such call */
    PyObject *explain;
    struct phx_record_group *recorded; /* NULL: its operations are not recorded */
    PyObject *recorded_by;             /* keeps that */
    struct entry_unheard last;
    struct entry_shapes shapes;
    void **pointers;
} entry;

extern struct entry_process entry_process;

/* How often this process or an ancestor was forked: counted in the child, by its only thread. */
extern uint64_t entry_forks;

/* Whether a profiler or a mode of torch's wants to see the calls of this process. */
int entry_is_watched(void);

/* Whether a mode for torch's functions is active on this thread: it is to see the call of torch.distributed that a quick
 * call of world's replaces. 1, 0, or -1 with an exception. */
int entry_is_seen_by_functions(void);

/* Find where this thread's call comes from, for entry_record(); 0 if it is not recorded. Returns -1 with an exception. */
int entry_find_site(entry *self, uint32_t *site);

/* Find that, and take the group's lock for a call here and now. Returns 1; 0 if the call is not for the entry: the group is
 * closed or inherited, an operation is queued or under way, or somebody watches; -1 with an exception. */
int entry_enter(entry *self, uint32_t *site);

/* Give it back. An exception that is set stays set. Returns -1 with an exception if there is one. */
int entry_leave(entry *self);

/* Make the type of the methods, once. Returns -1 with an exception. */
int entry_make_methods(void);

/* Returns a new dictionary of the group's quick methods. */
PyObject *entry_methods(PyObject *object, PyObject *ignored);

/* Make the type of recorded calls, once. Returns it, or NULL with an exception. */
PyObject *entry_make_recorded(void);

/* Free an object of one of the module's types, without what it holds. */
void entry_free_object(PyObject *self);

/* What a quick call returns that was not made: `Py_NotImplemented` without a reference. */
#define ENTRY_NOT_ME Py_NotImplemented

#define ENTRY_NOT_ENTERED(entered) ((entered) < 0 ? NULL : ENTRY_NOT_ME)

/* A call of the core, with the interpreter's lock given up. */
#define ENTRY_UNLOCKED(status, call)                                                                                         \
    do {                                                                                                               \
        PyThreadState *state = PyEval_SaveThread();                                                                    \
        (status) = (call);                                                                                             \
        PyEval_RestoreThread(state);                                                                                   \
    } while (0)

/* Record that an operation of the group begins at a place; what it returns is for core.record_end(). It runs no Python, so
 * no signal handler raises between it and the operation. */
uint64_t entry_record(entry *self, uint32_t what, uint64_t nbytes, uint32_t site, int64_t peer);

/* ENTRY_UNLOCKED for a call that is recorded. */
#define ENTRY_RECORDED(self, status, what, nbytes, site, peer, call)                                                         \
    do {                                                                                                               \
        const uint64_t ticket = entry_record(self, what, nbytes, site, peer);                                          \
        ENTRY_UNLOCKED(status, call);                                                                                  \
        entry_process.core.record_end(ticket, (status) != PHX_OK && (status) != PHX_CROSSED);                                                          \
    } while (0)

/* What a record says of an operation: an enum phx_kind, the core's dtype number for copies, its number of the reduction. */
#define ENTRY_WHAT(kind, dtype, op) ((uint32_t)(kind) | (uint32_t)(dtype) << 8 | (uint32_t)(op) << 16)

/* The only tensor of a list, described; 1, 0 or -1 as entry_read(). The list may change while other threads run, so with 1
 * the caller gets a reference of its own. */
int entry_read_only_one(struct entry_shapes *shapes, PyObject *list, PyObject **object, struct entry_tensor *out);

/* The quick calls: each returns a new reference; NULL with an exception; or ENTRY_NOT_ME. */
PyObject *entry_sum(entry *self, PyObject *const *args, Py_ssize_t nargs);
PyObject *entry_all_reduce(entry *self, PyObject *const *args, Py_ssize_t nargs);
PyObject *entry_reduce(entry *self, PyObject *const *args, Py_ssize_t nargs);
PyObject *entry_broadcast(entry *self, PyObject *const *args, Py_ssize_t nargs);
PyObject *entry_all_gather(entry *self, PyObject *const *args, Py_ssize_t nargs);
PyObject *entry_reduce_scatter(entry *self, PyObject *const *args, Py_ssize_t nargs);
PyObject *entry_barrier(entry *self, PyObject *const *args, Py_ssize_t nargs);
PyObject *entry_send_now(entry *self, PyObject *const *args, Py_ssize_t nargs);
PyObject *entry_recv_now(entry *self, PyObject *const *args, Py_ssize_t nargs);
PyObject *entry_send(entry *self, PyObject *const *args, Py_ssize_t nargs);
PyObject *entry_recv(entry *self, PyObject *const *args, Py_ssize_t nargs);

#endif
