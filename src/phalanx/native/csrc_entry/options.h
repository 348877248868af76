/* Reading torch's options of a call (AllreduceOptions and the like) where they lie in memory.
 *
 * They are C++ objects behind pybind11, and to read three of their properties from Python takes 2 to 4 us, twice what a
 * call of 4 bytes does. Where each property lies is not written down here: c10d/quick.py finds it out by setting the
 * properties one at a time and looking at what changes, and where the picture is not clear, Python reads them. */
#ifndef PHALANX_ENTRY_OPTIONS_H
#define PHALANX_ENTRY_OPTIONS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

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

/* Returns 1 if `object` is such options of a synchronous call without a timeout of its own, and gets its operation (-1 if
 * it has none) and root (likewise); else 0. */
int entry_usual(const struct entry_options *options, PyObject *object, int *op, int64_t *root);

/* Returns the bytes of an object of pybind11's as a new object, or NULL with an exception. */
PyObject *entry_bytes_of(PyObject *object);

#endif
