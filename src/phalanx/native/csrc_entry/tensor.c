/* Reading a tensor's metadata, and telling plain tensors from others. */
#include "tensor.h"

#define CPU 1 /* kDLCPU */

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

/* The number by which ranks compare shapes. Python computes it, so that there is one rule for it, and it is kept. */
static int word_of_shape(const struct entry_tensors *tensors, struct entry_shapes *shapes, PyObject *object,
                         const struct dl_tensor *tensor, uint64_t *word)
{
    uint64_t place = (uint64_t)tensor->ndim;
    for (int32_t d = 0; d < tensor->ndim; d++)
        place = (place ^ (uint64_t)tensor->shape[d]) * 0x9e3779b97f4a7c15ull;
    const uint32_t index = (uint32_t)(place >> 32) % ENTRY_SHAPES;
    int same = shapes->known[index].ndim == tensor->ndim;
    for (int32_t d = 0; same && d < tensor->ndim; d++)
        same = shapes->known[index].dims[d] == tensor->shape[d];
    if (same) {
        *word = shapes->known[index].word;
        return 0;
    }
    PyObject *shape = PyObject_GetAttr(object, tensors->shape);
    PyObject *number = shape ? PyObject_CallFunctionObjArgs(tensors->shape_word, shape, NULL) : NULL;
    Py_XDECREF(shape);
    if (!number)
        return -1;
    *word = PyLong_AsUnsignedLongLongMask(number);
    Py_DECREF(number);
    if (*word == (uint64_t)-1 && PyErr_Occurred())
        return -1;
    shapes->known[index].ndim = tensor->ndim;
    for (int32_t d = 0; d < tensor->ndim; d++)
        shapes->known[index].dims[d] = tensor->shape[d];
    shapes->known[index].word = *word;
    return 0;
}

int entry_read(const struct entry_tensors *tensors, struct entry_shapes *shapes, PyObject *object,
               struct entry_tensor *out)
{
    PyObject *kind = (PyObject *)Py_TYPE(object);
    if (kind != tensors->kinds[0] && kind != tensors->kinds[1])
        return 0;
    struct dl_tensor tensor;
    if (tensors->exchange->tensor_from_object(object, &tensor)) {
        PyErr_Clear(); /* sparse, on another device, of a dtype that DLPack does not know */
        return 0;
    }
    const struct entry_dtype *dtype = find_dtype(tensors, tensor.dtype);
    if (tensor.device.type != CPU || !dtype || tensor.ndim > ENTRY_DIMS || !is_contiguous(&tensor))
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
    if (!tensor.data && count)
        return 0; /* a tensor without memory of its own */
    if (count == 1) {
        /* The imaginary part of a conjugate has a bit that negates it. Longer ones are not contiguous. */
        PyObject *negative = PyObject_CallFunctionObjArgs(tensors->is_neg, object, NULL);
        if (!negative)
            return -1;
        Py_DECREF(negative);
        if (negative != Py_False)
            return 0;
    }
    return word_of_shape(tensors, shapes, object, &tensor, &out->shape_word) ? -1 : 1;
}

PyObject *entry_dtype_of(const struct entry_tensors *tensors, PyObject *object)
{
    struct dl_tensor tensor;
    if (tensors->exchange->tensor_from_object(object, &tensor))
        return NULL;
    return Py_BuildValue("(iii)", tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes);
}
