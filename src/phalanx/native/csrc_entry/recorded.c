/* A call of a communicator that is recorded: what c10d/recording.py does in Python, for calls that take microseconds.
 *
 * What is raised while the arguments are read or the line is found is raised to the caller, and the call is not made:
 * it may be a signal handler's exception, which comes through Python code of any kind. */
#include "entry.h"

#define OBJECTS 5

typedef struct {
    struct entry_callable base;
    union {
        struct {
            PyObject *body, *dtypes, *ops, *running, *keeper;
        };
        PyObject *objects[OBJECTS];
    };
    struct phx_record_group *group; /* which the keeper holds */
    unsigned int kind;
    int tensor_at, op_at, root_at; /* which arguments these are, -1: none */
} recorded;

static PyObject *name_nbytes, *name_dtype, *name_site;

/* The bytes of a tensor, or of all those in a list, and the number of their dtype. The caller looks for an exception.
 */
static uint64_t read_tensor(recorded *self, PyObject *tensor, uint32_t *dtype)
{
    if (PyList_Check(tensor) || PyTuple_Check(tensor)) {
        uint64_t all = 0;
        for (Py_ssize_t i = 0, n = PySequence_Size(tensor); i < n; i++) {
            PyObject *part = PySequence_GetItem(tensor, i);
            all += part ? read_tensor(self, part, dtype) : 0;
            Py_XDECREF(part);
            if (PyErr_Occurred())
                return 0;
        }
        return all;
    }
    PyObject *nbytes = PyObject_GetAttr(tensor, name_nbytes);
    PyObject *kind = nbytes ? PyObject_GetAttr(tensor, name_dtype) : NULL;
    PyObject *number = kind ? PyDict_GetItemWithError(self->dtypes, kind) : NULL; /* borrowed */
    const uint64_t size = nbytes ? PyLong_AsUnsignedLongLong(nbytes) : 0;
    *dtype = number ? (uint32_t)PyLong_AsUnsignedLong(number) : 0;
    Py_XDECREF(nbytes);
    Py_XDECREF(kind);
    return size;
}

/* Where the operation of this thread was called: if it was queued, its stack does not say (call_site.py). Returns -1
 * with an exception. */
static int find_site(recorded *self, uint32_t *site)
{
    struct entry_codes *codes = &entry_process.codes;
    PyObject *queued = PyObject_GetAttr(self->running, name_site);
    if (!queued)
        return -1;
    int failed;
    if (PyTuple_Check(queued) && PyTuple_Size(queued) == 2)
        failed = entry_number_of(codes, PyTuple_GetItem(queued, 0), PyLong_AsLong(PyTuple_GetItem(queued, 1)), site);
    else
        failed = entry_site_number(codes, site);
    Py_DECREF(queued);
    return failed;
}

static PyObject *call(PyObject *object, PyObject *const *args, size_t flagged, PyObject *names)
{
    recorded *self = (recorded *)object;
    const Py_ssize_t nargs = ENTRY_NARGS(flagged);
    if (names && PyTuple_Size(names))
        return PyErr_Format(PyExc_TypeError, "a recorded call takes its arguments by position");
    uint32_t site, what = self->kind, dtype = 0;
    PyObject *given = PyTuple_New(nargs);
    if (!given)
        return NULL;
    for (Py_ssize_t i = 0; i < nargs; i++) {
        Py_INCREF(args[i]);
        PyTuple_SetItem(given, i, args[i]);
    }
    uint64_t nbytes = 0;
    long root = -1;
    if (self->tensor_at >= 0 && self->tensor_at < nargs)
        nbytes = read_tensor(self, args[self->tensor_at], &dtype);
    if (PyErr_Occurred())
        goto failed;
    PyObject *op = self->op_at >= 0 && self->op_at < nargs ? PyDict_GetItemWithError(self->ops, args[self->op_at]) : NULL;
    what |= dtype | (op ? (uint32_t)PyLong_AsUnsignedLong(op) << 16 : 0);
    if (self->root_at >= 0 && self->root_at < nargs)
        root = PyLong_AsLong(args[self->root_at]);
    if (PyErr_Occurred() || find_site(self, &site))
        goto failed;
    const uint64_t ticket = phx_record_begin(self->group, what, nbytes, site, (int32_t)root);
    PyObject *result = PyObject_Call(self->body, given, NULL);
    phx_record_end(ticket, !result);
    Py_DECREF(given);
    return result;
failed:
    Py_DECREF(given);
    return NULL;
}

static PyObject *new_recorded(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    recorded made = {0};
    unsigned long long group;
    (void)keywords;
    if (!PyArg_ParseTuple(args, "OKOIiiiO!O!O", &made.body, &group, &made.keeper, &made.kind, &made.tensor_at,
                          &made.op_at, &made.root_at, &PyDict_Type, &made.dtypes, &PyDict_Type, &made.ops,
                          &made.running))
        return NULL;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    recorded *self = (recorded *)allocate(type, 0);
    if (!self)
        return NULL;
    made.base = self->base;
    made.base.vectorcall = call;
    made.group = (struct phx_record_group *)(uintptr_t)group;
    for (int i = 0; i < OBJECTS; i++)
        Py_INCREF(made.objects[i]);
    *self = made;
    return (PyObject *)self;
}

/* A queued call may hold the group, which holds this, and the communicator leads to the queue. */
static int traverse(PyObject *object, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(((recorded *)object)->body);
    return 0;
}

static void dealloc(PyObject *object)
{
    recorded *self = (recorded *)object;
    PyObject_GC_UnTrack(object);
    for (int i = 0; i < OBJECTS; i++)
        Py_XDECREF(self->objects[i]);
    entry_free_object(object);
}

static PyType_Slot slots[] = {
    {Py_tp_new, new_recorded},
    {Py_tp_dealloc, dealloc},
    {Py_tp_traverse, traverse},
    {Py_tp_call, PyVectorcall_Call},
    {Py_tp_members, entry_callable_members},
    {Py_tp_doc, "Recorded(body, group, keeper, kind, tensor, op, root, dtypes, ops, running): see c10d/recording.py"},
    {0, NULL},
};
static PyType_Spec spec = {
    "phalanx.native.entry.Recorded", sizeof(recorded), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC |
        ENTRY_HAVE_VECTORCALL,
    slots,
};

PyObject *entry_make_recorded(void)
{
    name_nbytes = PyUnicode_InternFromString("nbytes");
    name_dtype = PyUnicode_InternFromString("dtype");
    name_site = PyUnicode_InternFromString("site");
    return name_nbytes && name_dtype && name_site ? PyType_FromSpec(&spec) : NULL;
}
