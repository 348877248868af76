/* Reading torch's options of a call where they lie in memory. */
#include "options.h"

#include <malloc.h>
#include <string.h>

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

int entry_usual(const struct entry_options *options, PyObject *object, int *op, int64_t *root)
{
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

PyObject *entry_bytes_of(PyObject *object)
{
    const char *value = value_of(object);
    if (!value)
        return PyBytes_FromStringAndSize(NULL, 0);
    const size_t size = malloc_usable_size((void *)value);
    return PyBytes_FromStringAndSize(value, (Py_ssize_t)(size < ENTRY_MOST_OPTIONS ? size : ENTRY_MOST_OPTIONS));
}
