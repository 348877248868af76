/* Reading the arguments of torch's calls: tensors' metadata, telling plain tensors from others, and options.
 *
 * Tensors are read by DLPack's exchange functions, which torch gives. The structures are those of DLPack 1
 * (github.com/dmlc/dlpack). A later minor version only adds to their ends, and another major version is refused.
 *
 * Options (AllreduceOptions and the like) are C++ objects behind pybind11. To read three of their properties from
 * Python takes 2 to 4 us, twice what a call of 4 bytes does. c10d/quick.py finds out where each property lies, by
 * setting them one at a time and looking at what changes; where that is not clear, Python reads them. */
#include "entry.h"

#include <malloc.h>
#include <string.h>

#define CPU 1   /* kDLCPU */
#define FLOAT 2 /* kDLFloat */

static int is_contiguous(const struct dl_tensor *tensor)
{
    /* Strictly, dimensions of one element included: what views of complex numbers look like is left to torch. */
    int64_t expected = 1;
    for (int32_t d = tensor->ndim; d-- > 0;) {
        if (tensor->strides && tensor->strides[d] != expected)
            return 0;
        expected *= tensor->shape[d];
    }
    return 1;
}

static const struct entry_dtype *find_dtype(const struct entry_tensors *tensors, struct dl_dtype dtype)
{
    for (int i = 0; i < tensors->ndtypes; i++) {
        const struct dl_dtype *known = &tensors->dtypes[i].dl;
        if (known->code == dtype.code && known->bits == dtype.bits && known->lanes == dtype.lanes)
            return &tensors->dtypes[i];
    }
    return NULL;
}

/* The number by which ranks compare shapes, as shape_word() of diagnosis/call_site.py has it. */
static uint64_t word_of_shape(const struct dl_tensor *tensor)
{
    uint64_t word = 0;
    int count = 0;
    for (int32_t d = 0; d < tensor->ndim; d++)
        if (tensor->shape[d] > 1) {
            word = (word ^ (uint64_t)tensor->shape[d]) * 0x9e3779b97f4a7c15ull;
            count++;
        }
    return count > 1 ? word : 0;
}

/* Whether torch negates the tensor's data when it reads them: the imaginary part of a conjugate has a bit for that. Of
 * several numbers it is not contiguous, and complex numbers have parts of these dtypes only. 1, 0, or -1. */
static int is_negative(const struct entry_tensors *tensors, PyObject *object, const struct dl_tensor *tensor,
                       uint64_t count)
{
    if (count != 1 || tensor->dtype.code != FLOAT)
        return 0;
    PyObject *negative = PyObject_CallFunctionObjArgs(tensors->is_neg, object, NULL);
    Py_XDECREF(negative);
    return negative ? negative != Py_False : -1;
}

int entry_read(const struct entry_tensors *tensors, PyObject *object, struct entry_tensor *out)
{
    struct dl_tensor tensor;
    PyObject *kind = (PyObject *)Py_TYPE(object);
    if (kind != tensors->kinds[0] && kind != tensors->kinds[1])
        return 0;
    if (tensors->exchange->tensor_from_object(object, &tensor)) {
        PyErr_Clear(); /* sparse, on another device, of a dtype that DLPack does not know */
        return 0;
    }
    const struct entry_dtype *dtype = find_dtype(tensors, tensor.dtype);
    if (tensor.device.type != CPU || !dtype || !is_contiguous(&tensor))
        return 0;
    uint64_t count = 1;
    for (int32_t d = 0; d < tensor.ndim; d++)
        count *= (uint64_t)tensor.shape[d];
    out->data = tensor.data + tensor.byte_offset;
    out->count = count;
    out->nbytes = count * tensor.dtype.bits / 8;
    out->reduced = dtype->reduced;
    out->copied = dtype->copied;
    out->ops = dtype->ops;
    out->shape_word = word_of_shape(&tensor);
    if (!tensor.data && count)
        return 0; /* a tensor without memory of its own */
    const int negative = is_negative(tensors, object, &tensor, count);
    return negative < 0 ? -1 : !negative;
}

PyObject *entry_dtype_of(PyObject *module, PyObject *object)
{
    struct dl_tensor tensor;
    (void)module;
    if (entry_process.tensors.exchange->tensor_from_object(object, &tensor))
        return NULL;
    return Py_BuildValue("(iii)", tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes);
}

/* The C++ object behind one of pybind11's: a pointer to it follows the object's head. */
static const char *value_of(PyObject *object)
{
    const char *value;
    memcpy(&value, (const char *)object + sizeof(PyObject), sizeof value);
    return value;
}

static int64_t number_at(const char *value, int32_t at)
{
    int64_t number;
    memcpy(&number, value + at, sizeof number);
    return number;
}

int entry_usual(uint32_t kind, PyObject *object, int *op, int64_t *root)
{
    const struct entry_options *options = &entry_process.options[kind];
    if (!options->kind || (PyObject *)Py_TYPE(object) != options->kind)
        return 0;
    const char *value = value_of(object);
    if (!value || value[options->asynchronous] || number_at(value, options->timeout) != options->no_timeout)
        return 0;
    if (options->part >= 0 && number_at(value, options->part) != 0)
        return 0;
    *op = options->op < 0 ? -1 : (uint8_t)value[options->op];
    *root = options->root < 0 ? -1 : number_at(value, options->root);
    return 1;
}

PyObject *entry_bytes_of(PyObject *module, PyObject *object)
{
    const char *value = value_of(object);
    (void)module;
    if (!value)
        return PyBytes_FromStringAndSize(NULL, 0);
    const size_t size = malloc_usable_size((void *)value);
    return PyBytes_FromStringAndSize(value, (Py_ssize_t)(size < ENTRY_MOST_OPTIONS ? size : ENTRY_MOST_OPTIONS));
}
