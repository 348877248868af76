/* The module phalanx.native.entry: the usual calls of a process group in C. This is what its files share.
 *
 *   arguments  tensors and options, read without torch's Python or C++
 *   site       the line of the user's program that calls
 *   calls      the collectives; entering and leaving a group
 *   messages   send and recv
 *   method     the objects that a group has as its methods
 *   recorded   calls of a communicator that are recorded, for what is not made here
 *   module     the entry of a group as Python's object, and what is set up once */
#ifndef PHALANX_ENTRY_ENTRY_H
#define PHALANX_ENTRY_ENTRY_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include "arguments.h"
#include "phalanx.h"
#include "site.h"

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
    struct entry_tensors tensors;
    struct entry_codes codes;
    struct entry_options options[ENTRY_OPTION_CLASSES];
    uint32_t ops[ENTRY_OPS];        /* the core's number of each operation of torch's */
    PyObject *profiling, *modes;    /* the dictionaries with the flags that say whether somebody watches calls */
    PyObject *send_code, *recv_code; /* of torch's functions that wait for the message */
    PyObject *function_modes;        /* counts this thread's modes for torch's functions */
    PyObject *done_work, *done;     /* the class of handles of messages that are done, and one for nobody to keep */
    PyObject *is_profiling, *in_mode, *unheard, *ended, *comm; /* interned names */
};

/* The call of a group that other ranks may not have confirmed (transports/shm/communicator.py says which these are). */
#define ENTRY_OBJECTS 13 /* of an entry, that of its last unheard call at their end */
struct entry_unheard {
    PyObject *tensor_kind; /* (dtype, shape) */
    const char *name;
    uint32_t site; /* the recorder's number; 0: not known */
    int op;
    int64_t root;
};

/* One group's. The interpreter's lock guards all of it, except that `pointers` belongs to the holder of the group's
 * own lock, as the core's handle does: a call of the core is made by that holder only, with the interpreter's lock
 * given up. The thread that closes the group leaves something in its queue for ever, under the group's lock, before it
 * closes the core's handle; so a call that finds the queue empty under that lock cannot meet a closed handle. In a
 * forked child, whose groups are closed but which has the lock and the queue of its parent here, `forks` differs from
 * the count. */
typedef struct {
    PyObject ob_base;
    phx_comm *comm;
    uint64_t forks;
    uint32_t rank, size;
    union {
        struct {
            PyObject *group;               /* a weak reference: the group holds this entry */
            PyObject *queue, *state;       /* of c10d/progress.py */
            PyObject *acquire, *release;
            PyObject *fail;                /* raises the error for a status */
            PyObject *mailbox, *inside, *fail_message; /* transports/shm/mailbox.py; raises the error for a message */
            PyObject *communicator;        /* its `_unheard` gets `explain` when `last` is the latest such call */
            PyObject *explain;
            PyObject *recorded_by;         /* keeps `recorded` */
            struct entry_unheard last;
        };
        PyObject *objects[ENTRY_OBJECTS];
    };
    char *busy; /* the byte of the state: an operation is under way */
    struct phx_record_group *recorded; /* NULL: its operations are not recorded */
    void **pointers;
} entry;

extern struct entry_process entry_process;

/* How often this process or an ancestor was forked: counted in the child, by its only thread. */
extern uint64_t entry_forks;

/* Whether a profiler or a mode of torch's wants to see the calls of this process. */
int entry_is_watched(void);

/* Whether a mode for torch's functions is active on this thread: it is to see the call of torch.distributed that a
 * quick call of world's replaces. 1, 0, or -1 with an exception. */
int entry_is_seen_by_functions(void);

/* Find where this thread's call comes from, for entry_record(); 0 if it is not recorded. Returns -1 with an exception.
 */
int entry_find_site(entry *self, uint32_t *site);

/* Find that, and take the group's lock for a call here and now. Returns 1; 0 if the call is not for the entry: the
 * group is closed or inherited, an operation is queued or under way, or somebody watches; -1 with an exception. */
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
#define ENTRY_UNLOCKED(status, call)                                                                                   \
    do {                                                                                                               \
        PyThreadState *state = PyEval_SaveThread();                                                                    \
        (status) = (call);                                                                                             \
        PyEval_RestoreThread(state);                                                                                   \
    } while (0)

/* Record that an operation of the group begins at a place; what it returns is for phx_record_end(). It runs no Python,
 * so no signal handler raises between it and the operation. */
uint64_t entry_record(entry *self, uint32_t what, uint64_t nbytes, uint32_t site, int64_t peer);

/* ENTRY_UNLOCKED for a call that is recorded. */
#define ENTRY_RECORDED(self, status, what, nbytes, site, peer, call)                                                   \
    do {                                                                                                               \
        const uint64_t ticket = entry_record(self, what, nbytes, site, peer);                                          \
        ENTRY_UNLOCKED(status, call);                                                                                  \
        phx_record_end(ticket, (status) != PHX_OK && (status) != PHX_CROSSED);                                         \
    } while (0)

/* What a record says of an operation: an enum phx_kind, the core's dtype number for copies, its number of the
 * reduction. */
#define ENTRY_WHAT(kind, dtype, op) ((uint32_t)(kind) | (uint32_t)(dtype) << 8 | (uint32_t)(op) << 16)

/* The only tensor of a list, described; 1, 0 or -1 as entry_read(). The list may change while other threads run, so
 * with 1 the caller gets a reference of its own. */
int entry_read_only_one(PyObject *list, PyObject **object, struct entry_tensor *out);

/* What objects that can be called have in common: their beginning, and how they are called the slow way (tp_call).
 * Python 3.10's limited API has neither Py_TPFLAGS_HAVE_VECTORCALL nor PyVectorcall_NARGS. */
typedef PyObject *(*entry_vectorcall)(PyObject *, PyObject *const *, size_t, PyObject *);
struct entry_callable {
    PyObject ob_base;
    entry_vectorcall vectorcall;
};
#define ENTRY_HAVE_VECTORCALL (1UL << 11)
#define ENTRY_NARGS(n) ((Py_ssize_t)((n) & ~((size_t)1 << (8 * sizeof(size_t) - 1))))
PyObject *entry_call(PyObject *object, PyObject *args, PyObject *keywords);
extern PyMemberDef entry_callable_members[];

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
