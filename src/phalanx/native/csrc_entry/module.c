/* The module phalanx.native.entry: the stable-ABI way from Python into the core, for the usual calls.
 *
 * ctypes converts each argument and finds each attribute of a tensor anew, which takes twice as long as moving 4
 * bytes. This module does the usual calls in C and leaves all others to Python. It is built for Python's limited API
 * of 3.10, so that one file serves every later Python, and is not linked to torch, so that it serves every torch that
 * gives the functions of DLPack's exchange. Only c10d/quick.py uses it. */
#include "entry.h"

#include <pthread.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

_Static_assert(offsetof(entry, busy) == offsetof(entry, objects[ENTRY_OBJECTS]), "these are all objects");

/* -- a group's methods: each does the usual call in C and hands all others to the class's own method --------------- */

static const struct {
    const char *name;
    entry_quick_call quick;
    uint32_t kind;
} METHODS[] = {
    {"sum_in_place", entry_sum, PHX_ALL_REDUCE},
    {"allreduce", entry_call_with_one, PHX_ALL_REDUCE},
    {"reduce", entry_call_with_one, PHX_REDUCE},
    {"broadcast", entry_call_with_one, PHX_BROADCAST},
    {"_allgather_base", entry_call_with_both, PHX_ALL_GATHER},
    {"all_gather_single", entry_call_with_both, PHX_ALL_GATHER},
    {"_reduce_scatter_base", entry_call_with_both, PHX_REDUCE_SCATTER},
    {"reduce_scatter_single", entry_call_with_both, PHX_REDUCE_SCATTER},
    {"barrier", entry_barrier, PHX_BARRIER},
    {"send_now", entry_move_now, PHX_SEND},
    {"recv_now", entry_move_now, PHX_RECV},
    {"send", entry_move_listed, PHX_SEND},
    {"recv", entry_move_listed, PHX_RECV},
};

#define METHOD_COUNT (sizeof METHODS / sizeof *METHODS)

static PyObject *names; /* a tuple with the name of each, also that of the method in Python */

/* Call the class's own method. */
static PyObject *call_python(entry *self, PyObject *name, PyObject *const *args, Py_ssize_t nargs, PyObject *keywords)
{
    PyObject *group = PyWeakref_GetObject(self->group); /* borrowed */
    if (!group || group == Py_None) {
        PyErr_SetString(PyExc_ReferenceError, "the process group of this method no longer exists");
        return NULL;
    }
    PyObject *given = PyTuple_New(nargs + 1), *named = keywords ? PyDict_New() : NULL;
    PyObject *function = PyObject_GetAttr((PyObject *)Py_TYPE(group), name), *result = NULL;
    for (Py_ssize_t i = 0; given && i <= nargs; i++) {
        PyObject *each = i ? args[i - 1] : group;
        Py_INCREF(each);
        PyTuple_SetItem(given, i, each);
    }
    for (Py_ssize_t i = 0; named && i < PyTuple_Size(keywords); i++)
        if (PyDict_SetItem(named, PyTuple_GetItem(keywords, i), args[nargs + i]))
            Py_CLEAR(named);
    if (given && function && !PyErr_Occurred())
        result = PyObject_Call(function, given, named);
    Py_XDECREF(function);
    Py_XDECREF(named);
    Py_XDECREF(given);
    return result;
}

/* call(which, ...): one of METHODS. */
static PyObject *entry_call(PyObject *object, PyObject *const *args, Py_ssize_t nargs, PyObject *keywords)
{
    entry *self = (entry *)object;
    const size_t which = nargs-- ? PyLong_AsSize_t(*args++) : METHOD_COUNT;
    if (which >= METHOD_COUNT)
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "there is no such method");
    /* torch.distributed gives the options by position, except for a barrier's. */
    const Py_ssize_t named = keywords ? PyTuple_Size(keywords) : 0;
    PyObject *result = ENTRY_NOT_ME;
    if (!named || (named == 1 && !PyUnicode_CompareWithASCIIString(PyTuple_GetItem(keywords, 0), "opts")))
        result = METHODS[which].quick(self, METHODS[which].kind, args, nargs + named);
    return result == ENTRY_NOT_ME ? call_python(self, PyTuple_GetItem(names, which), args, nargs, keywords) : result;
}

/* -- a group's entry ----------------------------------------------------------------------------------------------- */

static int entry_traverse(PyObject *object, visitproc visit, void *arg)
{
    entry *self = (entry *)object;
    Py_VISIT(Py_TYPE(object));
    for (int i = 0; i < ENTRY_OBJECTS; i++)
        Py_VISIT(self->objects[i]);
    return 0;
}

static void entry_dealloc(PyObject *object)
{
    entry *self = (entry *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    for (int i = 0; i < ENTRY_OBJECTS; i++)
        Py_XDECREF(self->objects[i]);
    free(self->pointers);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyObject *entry_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    PyObject *objects[ENTRY_OBJECTS], **o = objects;
    unsigned long long comm, recorded;
    unsigned int rank, size;
    (void)keywords;
    if (!PyArg_ParseTuple(args, "KIIKOOO!OOOOO!OOO", &comm, &rank, &size, &recorded, o, o + 1, &PyByteArray_Type, o + 2,
                          o + 3, o + 4, o + 5, o + 6, &PyList_Type, o + 7, o + 8, o + 9, o + 10))
        return NULL;
    entry *self = (entry *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!self)
        return NULL;
    for (int i = 0; i < ENTRY_OBJECTS; i++) {
        Py_INCREF(objects[i]);
        self->objects[i] = objects[i];
    }
    self->recorded = (struct phx_record_group *)(uintptr_t)recorded;
    self->comm = (phx_comm *)(uintptr_t)comm;
    self->forks = entry_forks;
    self->rank = rank;
    self->size = size;
    self->busy = PyByteArray_AsString(self->state);
    self->pointers = calloc(size, sizeof *self->pointers);
    if (self->pointers)
        return (PyObject *)self;
    Py_DECREF(self);
    return PyErr_NoMemory();
}

static PyMethodDef entry_defs[] = {
    {"call", (PyCFunction)(void (*)(void))entry_call, METH_FASTCALL | METH_KEYWORDS, "call(which of NAMES, ...)"},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot entry_slots[] = {
    {Py_tp_new, entry_new},
    {Py_tp_dealloc, entry_dealloc},
    {Py_tp_traverse, entry_traverse},
    {Py_tp_methods, entry_defs},
    {Py_tp_doc, "Entry(comm, rank, size, recorded, and the objects of its struct): a group's quick calls."},
    {0, NULL},
};
static PyTypeObject *entry_type;
static PyType_Spec entry_spec = {
    "phalanx.native.entry.Entry", sizeof(entry), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, entry_slots,
};

/* -- what is the same for all groups ------------------------------------------------------------------------------- */

static PyObject *set_exchange(PyObject *module, PyObject *capsule)
{
    const struct dl_exchange *exchange = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    (void)module;
    if (!exchange)
        return NULL;
    if (exchange->version.major != 1 || !exchange->tensor_from_object)
        return PyErr_Format(PyExc_ValueError, "torch exchanges tensors by DLPack %u, or not by reference; known is 1",
                            (unsigned)exchange->version.major);
    entry_process.tensors.exchange = exchange;
    Py_RETURN_NONE;
}

static PyObject *set_up(PyObject *module, PyObject *args)
{
    struct entry_process *process = &entry_process;
    struct entry_tensors *tensors = &process->tensors;
    const char *dtypes, *ops;
    Py_ssize_t dtypes_bytes, ops_bytes;
    (void)module;
    if (!PyArg_ParseTuple(args, "y#y#OOOO!O!OOOOOO", &dtypes, &dtypes_bytes, &ops, &ops_bytes, &tensors->kinds[0],
                          &tensors->kinds[1], &tensors->is_neg, &PyDict_Type, &process->profiling,
                          &PyDict_Type, &process->modes, &process->send_code, &process->recv_code, &process->done_work,
                          &process->done, &process->function_modes, &process->text_of_call))
        return NULL;
    if (dtypes_bytes > (Py_ssize_t)sizeof tensors->dtypes || ops_bytes > (Py_ssize_t)sizeof process->ops)
        return PyErr_Format(PyExc_ValueError, "set_up: more dtypes or operations than there is room for");
    Py_INCREF(args); /* which holds all of them, for as long as the process lives */
    tensors->ndtypes = (int)(dtypes_bytes / (Py_ssize_t)sizeof *tensors->dtypes);
    memcpy(tensors->dtypes, dtypes, (size_t)dtypes_bytes);
    memcpy(process->ops, ops, (size_t)ops_bytes);
    Py_RETURN_NONE;
}

static PyObject *set_options(PyObject *module, PyObject *args)
{
    int which, asynchronous, timeout, op, root, part;
    long long no_timeout;
    PyObject *kind;
    (void)module;
    if (!PyArg_ParseTuple(args, "iOiiiiiL", &which, &kind, &asynchronous, &timeout, &op, &root, &part, &no_timeout))
        return NULL;
    if (which < 0 || which >= PHX_SEND)
        return PyErr_Format(PyExc_ValueError, "set_options: the number is not that of a collective");
    Py_INCREF(kind);
    entry_process.options[which] = (struct entry_options){kind, asynchronous, timeout, op, root, part, no_timeout};
    Py_RETURN_NONE;
}

static PyObject *set_recorder(PyObject *module, PyObject *args)
{
    struct entry_codes *codes = &entry_process.codes;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOO", &codes->is_inside, &codes->number_of, &codes->running))
        return NULL;
    Py_INCREF(args); /* for as long as the process lives */
    Py_RETURN_NONE;
}

static PyObject *site_number(PyObject *module, PyObject *nothing)
{
    (void)module;
    (void)nothing;
    uint32_t number;
    return entry_queued_site_number(&entry_process.codes, &number) ? NULL : PyLong_FromUnsignedLong(number);
}

static PyObject *record_begin(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    (void)module;
    if (nargs != 4)
        return PyErr_Format(PyExc_TypeError, "record_begin(group, what, nbytes, peer)");
    struct phx_record_group *group = PyLong_AsVoidPtr(args[0]);
    const uint32_t what = (uint32_t)PyLong_AsUnsignedLong(args[1]);
    const uint64_t nbytes = PyLong_AsUnsignedLongLong(args[2]);
    const long peer = PyLong_AsLong(args[3]);
    uint32_t site;
    if (PyErr_Occurred() || entry_queued_site_number(&entry_process.codes, &site))
        return NULL;
    return PyLong_FromUnsignedLongLong(phx_record_begin(group, what, nbytes, site, (int32_t)peer));
}

static PyObject *record_end(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    (void)module;
    if (nargs != 2)
        return PyErr_Format(PyExc_TypeError, "record_end(ticket, failed)");
    const uint64_t ticket = PyLong_AsUnsignedLongLong(args[0]);
    const int failed = PyObject_IsTrue(args[1]);
    if (PyErr_Occurred())
        return NULL;
    phx_record_end(ticket, failed);
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"set_recorder", set_recorder, METH_VARARGS, "set_recorder(is_inside, number_of, running): diagnosis/recorder.py"},
    {"site_number", site_number, METH_NOARGS, "The recorder's number of the user's line that calls; 0: none."},
    {"record_begin", (PyCFunction)(void (*)(void))record_begin, METH_FASTCALL, "phx_record_begin(), from this line."},
    {"record_end", (PyCFunction)(void (*)(void))record_end, METH_FASTCALL, "The core's phx_record_end()."},
    {"set_exchange", set_exchange, METH_O, "set_exchange(capsule): torch's functions that describe tensors."},
    {"set_up", set_up, METH_VARARGS, "set_up(dtypes, ops, Tensor, ...): see c10d/quick.py"},
    {"set_options", set_options, METH_VARARGS, "set_options(kind, class, asyncOp, timeout, op, root, part, default)"},
    {"dtype_of", entry_dtype_of, METH_O, "dtype_of(tensor): its dtype as DLPack's (code, bits, lanes)."},
    {"bytes_of", entry_bytes_of, METH_O, "bytes_of(options): the C++ object behind one of pybind11's, as bytes."},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "phalanx.native.entry",
    .m_doc = "The usual calls of process groups, in C.",
    .m_size = -1,
    .m_methods = functions,
};

static void count_fork(void)
{
    entry_forks++;
}

PyMODINIT_FUNC PyInit_entry(void)
{
    PyObject *module = PyModule_Create(&definition);
    if (!module)
        return NULL;
    entry_type = (PyTypeObject *)PyType_FromSpec(&entry_spec);
    names = PyTuple_New(METHOD_COUNT);
    for (size_t i = 0; names && i < METHOD_COUNT; i++)
        PyTuple_SetItem(names, (Py_ssize_t)i, PyUnicode_InternFromString(METHODS[i].name));
    entry_process.is_profiling = PyUnicode_InternFromString("_is_profiler_enabled");
    entry_process.in_mode = PyUnicode_InternFromString("_is_in_torch_dispatch_mode");
    entry_process.unheard = PyUnicode_InternFromString("_unheard");
    entry_process.ended = PyUnicode_InternFromString("ended");
    entry_process.comm = PyUnicode_InternFromString("comm");
    entry_process.dtype = PyUnicode_InternFromString("dtype");
    entry_process.shape = PyUnicode_InternFromString("shape");
    entry_process.codes.site = PyUnicode_InternFromString("site");
    if (PyErr_Occurred() || pthread_atfork(NULL, NULL, count_fork) ||
        PyModule_AddObject(module, "Entry", (PyObject *)entry_type) || PyModule_AddObjectRef(module, "NAMES", names) ||
        PyModule_AddIntConstant(module, "ABI", PHX_ABI)) {
        Py_DECREF(module);
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    }
    return module;
}
