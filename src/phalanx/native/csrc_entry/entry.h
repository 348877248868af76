/* The module phalanx.native.entry: the usual calls of a process group in C. This is what its files share.
 *
 *   arguments  tensors and options, read without torch's Python or C++, to which the module is not linked
 *   site       the line of the user's program that calls
 *   calls      the collectives, send and recv
 *   module     the entry of a group and its methods as Python's objects, and what is set up once */
#ifndef PHALANX_ENTRY_ENTRY_H
#define PHALANX_ENTRY_ENTRY_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

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

/* A dtype that the entry serves, by its numbers in the core. c10d/quick.py packs these. */
struct entry_dtype {
    struct dl_dtype dl;
    uint32_t reduced, copied; /* for reductions (0: there are none) and for copies */
    uint32_t ops;             /* a bit for each operation of torch's that reduces it */
};

struct entry_tensors {
    const struct dl_exchange *exchange;
    PyObject *kinds[2]; /* torch.Tensor and torch.nn.Parameter */
    PyObject *is_neg;   /* the method */
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

/* Returns 1 if `object` is such options of a synchronous call of this enum phx_kind, without a timeout of its own, and
 * gets its operation (-1 if it has none) and root (likewise); else 0. */
int entry_usual(uint32_t kind, PyObject *object, int *op, int64_t *root);

/* -- site.c ------------------------------------------------------------------------------------------------------- */

#define ENTRY_CODES 1024
#define ENTRY_SITES 256

/* What was learned about code, for one process. The interpreter's lock guards it. */
struct entry_codes {
    PyObject *is_inside;            /* asks diagnosis/call_site.py about a frame */
    PyObject *number_of;            /* gives the number of a place (recorder.py) */
    PyObject *running;              /* has the place of the queued operation that this thread runs (call_site.py) */
    PyObject *site;                 /* an interned name */
    struct {
        PyObject *code;             /* held, so that no other code gets its address; NULL: free */
        int inside;                 /* it is torch's or ours, and passed over */
    } known[ENTRY_CODES];           /* answers, each in the one place that its code has: a later one replaces it */
    struct {
        PyObject *code;             /* held */
        long instruction;
        uint32_t number;
    } sites[ENTRY_SITES];           /* numbers, likewise */
};

/* The recorder's number of the place where this thread's call comes from; 0 if it is not known. Returns -1 with an
 * exception, which may be a signal handler's: a new place is looked up in Python, where handlers run. So the place is
 * found before anything of the call is begun. */
int entry_site_number(struct entry_codes *codes, uint32_t *number);

/* The same for an operation that may have been queued: then this thread's stack does not show the place. */
int entry_queued_site_number(struct entry_codes *codes, uint32_t *number);

/* Return whether the function that is running was called by one with this code. */
int entry_is_called_by(PyObject *code);

/* -- a process, and its groups ------------------------------------------------------------------------------------- */

#define ENTRY_OPS 16

/* What is the same for all groups; filled in once, by the thread that imports the module, before any group has an
 * entry. */
struct entry_process {
    struct entry_tensors tensors;
    struct entry_codes codes;
    struct entry_options options[PHX_SEND]; /* by enum phx_kind, of the collectives that the entry does */
    uint32_t ops[ENTRY_OPS];         /* the core's number of each operation of torch's */
    PyObject *profiling, *modes;     /* the dictionaries with the flags that say whether somebody watches calls */
    PyObject *function_modes;        /* counts this thread's modes for torch's functions */
    PyObject *send_code, *recv_code; /* of torch's functions that wait for the message */
    PyObject *done_work, *done;      /* the class of handles of messages that are done, and one for nobody to keep */
    PyObject *text_of_call;          /* describes a call in words, for errors */
    PyObject *is_profiling, *in_mode, *unheard, *ended, *comm, *dtype, *shape; /* interned names */
};

#define ENTRY_OBJECTS 11

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
            PyObject *communicator;        /* its `_unheard` is the last call that others may not have confirmed */
            PyObject *recorded_by;         /* keeps `recorded` */
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

/* What a quick call returns that was not made: `Py_NotImplemented` without a reference. */
#define ENTRY_NOT_ME Py_NotImplemented

/* The quick calls of an enum phx_kind: each returns a new reference; NULL with an exception; or ENTRY_NOT_ME. */
typedef PyObject *(*entry_quick_call)(entry *self, uint32_t kind, PyObject *const *args, Py_ssize_t nargs);
PyObject *entry_sum(entry *self, uint32_t kind, PyObject *const *args, Py_ssize_t nargs);
PyObject *entry_call_with_one(entry *self, uint32_t kind, PyObject *const *args, Py_ssize_t nargs);
PyObject *entry_call_with_both(entry *self, uint32_t kind, PyObject *const *args, Py_ssize_t nargs);
PyObject *entry_barrier(entry *self, uint32_t kind, PyObject *const *args, Py_ssize_t nargs);
PyObject *entry_move_now(entry *self, uint32_t kind, PyObject *const *args, Py_ssize_t nargs);
PyObject *entry_move_listed(entry *self, uint32_t kind, PyObject *const *args, Py_ssize_t nargs);

#endif
