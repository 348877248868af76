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

#define MOST_ARGUMENTS 3 /* of a quick call */

_Static_assert(offsetof(entry, busy) == offsetof(entry, objects[ENTRY_OBJECTS]), "these are all objects");

/* Free an object of one of the module's types, without what it holds. */
static void free_object(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

/* -- a group's methods: each does the usual call in C and hands all others to the class's own method --------------- */

/* An object of its own and not a built-in function: pybind11 takes a built-in for its own method, and would call the
 * C++ one in its place where C++ asks for the group's. */
typedef struct {
    PyObject ob_base;
    entry *entry;
    entry_quick_call quick;
    uint32_t kind;
    PyObject *name; /* also that of the method in Python, which does all that the quick one does not */
} method;

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

/* Call the class's own method. */
static PyObject *call_python(method *self, PyObject *args, PyObject *keywords)
{
    PyObject *group = PyWeakref_GetObject(self->entry->group); /* borrowed */
    if (!group || group == Py_None) {
        PyErr_SetString(PyExc_ReferenceError, "the process group of this method no longer exists");
        return NULL;
    }
    PyObject *own = Py_BuildValue("(O)", group); /* which keeps the group */
    PyObject *given = own ? PySequence_Concat(own, args) : NULL;
    PyObject *function = given ? PyObject_GetAttr((PyObject *)Py_TYPE(group), self->name) : NULL;
    PyObject *result = function ? PyObject_Call(function, given, keywords) : NULL;
    Py_XDECREF(function);
    Py_XDECREF(given);
    Py_XDECREF(own);
    return result;
}

static PyObject *method_call(PyObject *object, PyObject *args, PyObject *keywords)
{
    method *self = (method *)object;
    PyObject *given[MOST_ARGUMENTS], *result = ENTRY_NOT_ME;
    Py_ssize_t nargs = PyTuple_Size(args);
    for (Py_ssize_t i = 0; i < nargs && i < MOST_ARGUMENTS; i++)
        given[i] = PyTuple_GetItem(args, i);
    /* torch.distributed gives the options by position, except for a barrier's. */
    PyObject *options = keywords && PyDict_Size(keywords) == 1 ? PyDict_GetItemString(keywords, "opts") : NULL;
    if (options && nargs < MOST_ARGUMENTS)
        given[nargs++] = options;
    if (nargs <= MOST_ARGUMENTS && (!keywords || options || !PyDict_Size(keywords)))
        result = self->quick(self->entry, self->kind, given, nargs);
    return result == ENTRY_NOT_ME ? call_python(self, args, keywords) : result;
}

static int method_traverse(PyObject *object, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(object));
    Py_VISIT((PyObject *)((method *)object)->entry);
    return 0;
}

static void method_dealloc(PyObject *object)
{
    method *self = (method *)object;
    PyObject_GC_UnTrack(object);
    Py_XDECREF((PyObject *)self->entry);
    Py_XDECREF(self->name);
    free_object(object);
}

static PyType_Slot method_slots[] = {
    {Py_tp_dealloc, method_dealloc},
    {Py_tp_traverse, method_traverse}, /* a queued call may hold the group, and is held by its queue */
    {Py_tp_call, method_call},
    {Py_tp_doc, "A method of one process group that does the usual call in C and hands all others to the class's."},
    {0, NULL},
};
static PyType_Spec method_spec = {
    "phalanx.native.entry.Method", sizeof(method), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, method_slots,
};
static PyTypeObject *method_type;

static PyObject *entry_methods(PyObject *object, PyObject *ignored)
{
    PyObject *all = PyDict_New();
    (void)ignored;
    for (size_t i = 0; all && i < sizeof METHODS / sizeof *METHODS; i++) {
        allocfunc allocate = (allocfunc)PyType_GetSlot(method_type, Py_tp_alloc);
        method *made = (method *)allocate(method_type, 0);
        if (made) {
            Py_INCREF(object);
            made->entry = (entry *)object;
            made->quick = METHODS[i].quick;
            made->kind = METHODS[i].kind;
            made->name = PyUnicode_InternFromString(METHODS[i].name);
        }
        if (!made || !made->name || PyDict_SetItemString(all, METHODS[i].name, (PyObject *)made))
            Py_CLEAR(all);
        Py_XDECREF((PyObject *)made);
    }
    return all;
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
    PyObject_GC_UnTrack(object);
    for (int i = 0; i < ENTRY_OBJECTS; i++)
        Py_XDECREF(self->objects[i]);
    free(self->pointers);
    free_object(object);
}

static PyObject *entry_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    PyObject *group, *progress, *communicator, *recorded_by;
    unsigned long long comm, recorded;
    unsigned int rank, size;
    (void)keywords;
    if (!PyArg_ParseTuple(args, "OKIIOOKO", &group, &comm, &rank, &size, &progress, &communicator, &recorded,
                          &recorded_by))
        return NULL;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    entry *self = (entry *)allocate(type, 0);
    if (!self)
        return NULL;
    PyObject *running = PyObject_GetAttrString(progress, "running");
    Py_INCREF(communicator);
    Py_INCREF(recorded_by);
    self->recorded = (struct phx_record_group *)(uintptr_t)recorded;
    self->recorded_by = recorded_by;
    self->comm = (phx_comm *)(uintptr_t)comm;
    self->forks = entry_forks;
    self->rank = rank;
    self->size = size;
    self->communicator = communicator;
    self->group = PyWeakref_NewRef(group, NULL);
    self->queue = PyObject_GetAttrString(progress, "queue");
    self->state = PyObject_GetAttrString(progress, "state");
    self->busy = self->state && PyByteArray_Size(self->state) == 1 ? PyByteArray_AsString(self->state) : NULL;
    self->acquire = running ? PyObject_GetAttrString(running, "acquire") : NULL;
    self->release = running ? PyObject_GetAttrString(running, "release") : NULL;
    self->fail = PyObject_GetAttrString(communicator, "_fail");
    self->mailbox = PyObject_GetAttrString(communicator, "_mailbox");
    self->inside = self->mailbox ? PyObject_GetAttrString(self->mailbox, "inside") : NULL;
    self->fail_message = self->mailbox ? PyObject_GetAttrString(self->mailbox, "fail") : NULL;
    self->pointers = calloc(size, sizeof *self->pointers);
    Py_XDECREF(running);
    if (!PyErr_Occurred() && self->busy && PyList_CheckExact(self->inside) && self->pointers)
        return (PyObject *)self;
    Py_DECREF(self);
    return PyErr_Occurred() ? NULL : PyErr_NoMemory();
}

static PyMethodDef entry_defs[] = {
    {"methods", entry_methods, METH_NOARGS, "A new dictionary of the group's quick methods."},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot entry_slots[] = {
    {Py_tp_new, entry_new},
    {Py_tp_dealloc, entry_dealloc},
    {Py_tp_traverse, entry_traverse},
    {Py_tp_methods, entry_defs},
    {Py_tp_doc, "Entry(group, comm, rank, size, progress, communicator, recorded, its keeper): a group's quick calls."},
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
    if (which < 0 || which >= ENTRY_OPTION_CLASSES)
        return PyErr_Format(PyExc_ValueError, "set_options: the number is not one of enum entry_option_class");
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
    {"set_options", set_options, METH_VARARGS, "set_options(which, class, asyncOp, timeout, op, root, part, default)"},
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
    method_type = (PyTypeObject *)PyType_FromSpec(&method_spec);
    entry_process.is_profiling = PyUnicode_InternFromString("_is_profiler_enabled");
    entry_process.in_mode = PyUnicode_InternFromString("_is_in_torch_dispatch_mode");
    entry_process.unheard = PyUnicode_InternFromString("_unheard");
    entry_process.ended = PyUnicode_InternFromString("ended");
    entry_process.comm = PyUnicode_InternFromString("comm");
    entry_process.dtype = PyUnicode_InternFromString("dtype");
    entry_process.shape = PyUnicode_InternFromString("shape");
    entry_process.codes.site = PyUnicode_InternFromString("site");
    if (PyErr_Occurred() || pthread_atfork(NULL, NULL, count_fork) ||
        PyModule_AddObject(module, "Entry", (PyObject *)entry_type) ||
        PyModule_AddIntConstant(module, "ABI", PHX_ABI)) {
        Py_DECREF(module);
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    }
    return module;
}
