/* The module phalanx.native.entry: the usual calls of a process group in C. This is what its files share.
 *
 *   arguments  tensors and options, read without torch's Python or C++, to which the module is not linked
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
#include <stdint.h>
#include <structmember.h>

#include "phalanx.h"

/* -- arguments.c -------------------------------------------------------------------------------------------------- */

struct dl_dtype {
    uint8_t code, bits;
    uint16_t lanes;
};

struct dl_tensor {
    char *data;
    struct {
        int32_t type, index;
    } device;
    int32_t ndim;
    struct dl_dtype dtype;
    int64_t *shape, *strides; /* the tensor's own; valid as long as nobody resizes it */
    uint64_t byte_offset;
};

struct dl_exchange {
    struct {
        uint32_t major, minor;
    } version;
    void *previous, *allocate, *managed_from_object, *managed_to_object;
    int (*tensor_from_object)(void *object, struct dl_tensor *out);
    void *work_stream;
};

#define ENTRY_DTYPES 64

/* A dtype that the entry serves, by its numbers in the core. */
struct entry_dtype {
    struct dl_dtype dl;
    uint32_t reduced, copied; /* for reductions (0: there are none) and for copies */
    uint32_t ops;             /* a bit for each operation of torch's that reduces it */
};

/* What there is to know about tensors for one process; filled in once, by the thread that imports the module. */
struct entry_tensors {
    const struct dl_exchange *exchange;
    PyObject *kinds[2]; /* torch.Tensor and torch.nn.Parameter */
    PyObject *is_neg;   /* the method */
    PyObject *shape; /* interned names */
    struct entry_dtype dtypes[ENTRY_DTYPES];
    int ndtypes;
};

/* A plain tensor: on the CPU, contiguous, of a type of torch's own, without a bit that changes the meaning of its
 * data. */
struct entry_tensor {
    char *data;
    uint64_t count, nbytes, shape_word;
    uint32_t reduced, copied, ops; /* as in struct entry_dtype */
};

/* Returns 1 if `object` is a plain tensor, which `out` then describes; 0 if it is anything else; -1 with an exception.
 * Other threads may run meanwhile. */
int entry_read(const struct entry_tensors *tensors, PyObject *object, struct entry_tensor *out);

/* Whether the tensor still has the memory and the shape that were read, and no other thread has resized it. No other
 * thread runs meanwhile, so the answer holds until the interpreter's lock is given up. */
int entry_unchanged(const struct entry_tensors *tensors, PyObject *object, const struct entry_tensor *tensor);

/* Functions of the module: a tensor's dtype as (code, bits, lanes); and the bytes of an object of pybind11's. */
PyObject *entry_dtype_of(PyObject *module, PyObject *tensor);
PyObject *entry_bytes_of(PyObject *module, PyObject *options);

#define ENTRY_MOST_OPTIONS 192 /* bytes that are looked at */

/* One class of options: which it is, and where its properties lie, in bytes; -1 for one that it has not. */
struct entry_options {
    PyObject *kind;
    int32_t asynchronous; /* uint8_t: asyncOp */
    int32_t timeout;      /* int64_t */
    int32_t op;           /* uint8_t: reduceOp */
    int32_t root;         /* int64_t: rootRank */
    int32_t part;         /* int64_t: rootTensor, which must be 0 */
    int64_t no_timeout;   /* the timeout of options that were given none */
};

/* Returns 1 if `object` is such options of a synchronous call without a timeout of its own, and gets its operation (-1
 * if it has none) and root (likewise); else 0. */
int entry_usual(const struct entry_options *options, PyObject *object, int *op, int64_t *root);
/* -- site.c ------------------------------------------------------------------------------------------------------- */

#define ENTRY_CODES 1024
#define ENTRY_SITES 256

/* What was learned about code, for one process. The interpreter's lock guards it. */
struct entry_codes {
    PyObject *is_inside;            /* asks diagnosis/call_site.py about a frame */
    struct {
        PyObject *code;             /* held; NULL: free */
        int inside;                 /* it is torch's or ours, and passed over */
    } known[ENTRY_CODES];
    size_t count;
    /* PyFrame_GetBack and PyFrame_GetLasti, which the limited API lacks. NULL in Python 3.10: frames have attributes.
     */
    PyObject *(*back_of)(PyObject *frame);
    int (*lasti_of)(PyObject *frame);
    PyObject *f_back, *f_lasti;     /* interned names */
    PyObject *number_of;            /* gives the number of a place (recorder.py) */
    struct {
        PyObject *code;             /* held */
        long instruction;
        uint32_t number;
    } sites[ENTRY_SITES];           /* numbers that were asked for before */
};

/* Find those functions; once, before any call here. Returns -1 with an exception. */
int entry_find_frames(struct entry_codes *codes);

/* The frame that called `frame`, a new reference, or NULL; with an exception if there is one. */
PyObject *entry_caller_of(struct entry_codes *codes, PyObject *frame);

/* The recorder's number of a place, whose code the caller holds; 0 if there is none. Returns -1 with an exception,
 * which may be a signal handler's: a new place is looked up in Python, where handlers run. So the place is found
 * before anything of the call is begun. */
int entry_number_of(struct entry_codes *codes, PyObject *code, long instruction, uint32_t *number);

/* The same for the place where this thread's call comes from; 0 if it is not known. */
int entry_site_number(struct entry_codes *codes, uint32_t *number);

/* -- a process, and its groups ------------------------------------------------------------------------------------- */

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

/* The beginning of objects that can be called. The limited API has what follows from Python 3.12 on; 3.10 and 3.11 have the
 * same in their full API. */
typedef PyObject *(*entry_vectorcall)(PyObject *, PyObject *const *, size_t, PyObject *);
struct entry_callable {
    PyObject ob_base;
    entry_vectorcall vectorcall;
};
#define ENTRY_HAVE_VECTORCALL (1UL << 11)
#define ENTRY_NARGS(n) ((Py_ssize_t)((n) & ~((size_t)1 << (8 * sizeof(size_t) - 1))))
PyObject *PyVectorcall_Call(PyObject *object, PyObject *args, PyObject *keywords);
extern PyMemberDef entry_callable_members[];

/* The quick calls of an enum phx_kind: each returns a new reference; NULL with an exception; or ENTRY_NOT_ME. */
typedef PyObject *(*entry_quick_call)(entry *self, uint32_t kind, PyObject *const *args, Py_ssize_t nargs);
PyObject *entry_sum(entry *self, uint32_t kind, PyObject *const *args, Py_ssize_t nargs);
PyObject *entry_call_with_one(entry *self, uint32_t kind, PyObject *const *args, Py_ssize_t nargs);
PyObject *entry_call_with_both(entry *self, uint32_t kind, PyObject *const *args, Py_ssize_t nargs);
PyObject *entry_barrier(entry *self, uint32_t kind, PyObject *const *args, Py_ssize_t nargs);
PyObject *entry_move_now(entry *self, uint32_t kind, PyObject *const *args, Py_ssize_t nargs);
PyObject *entry_move_listed(entry *self, uint32_t kind, PyObject *const *args, Py_ssize_t nargs);

#endif
