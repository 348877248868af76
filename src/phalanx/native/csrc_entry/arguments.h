/* Reading the arguments of torch's calls without its Python or C++: tensors and options.
 *
 * Tensors are read by DLPack's exchange functions, which torch gives without being linked to. The structures are those
 * of DLPack 1 (github.com/dmlc/dlpack). A later minor version only adds to their ends, and another major version is
 * refused.
 *
 * Options (AllreduceOptions and the like) are C++ objects behind pybind11, and to read three of their properties from
 * Python takes 2 to 4 us, twice what a call of 4 bytes does. Where each property lies is not written down here:
 * c10d/quick.py finds it out by setting the properties one at a time and looking at what changes, and where the
 * picture is not clear, Python reads them. */
#ifndef PHALANX_ENTRY_ARGUMENTS_H
#define PHALANX_ENTRY_ARGUMENTS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

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

/* Returns a new tuple (code, bits, lanes) of a tensor's dtype, or NULL with an exception. */
PyObject *entry_dtype_of(const struct entry_tensors *tensors, PyObject *object);

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

/* Returns the bytes of an object of pybind11's as a new object, or NULL with an exception. */
PyObject *entry_bytes_of(PyObject *object);

#endif
