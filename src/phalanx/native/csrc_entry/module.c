/* The module phalanx.native.entry: the stable-ABI way from Python into the core, for the usual calls.
 *
 * ctypes converts each argument and finds each attribute of a tensor anew, which takes twice as long as moving 4 bytes.
 * This module does the usual calls in C and leaves all others to Python. It is built for Python's limited API of 3.10, so
 * that one file serves every later Python, and is not linked to torch, so that it serves every torch that gives the
 * functions of DLPack's exchange. Only c10d/quick.py uses it. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "entry.h"

static PyTypeObject *entry_type;

/* -- a group's entry --------------------------------------------------------------------------------------------------- */

/* The entry and its communicator hold each other, by the communicator's `_unheard`: the garbage collector parts them. */
static int entry_traverse(PyObject *object, visitproc visit, void *arg)
{
    entry *self = (entry *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->progress);
    Py_VISIT(self->queue);
    Py_VISIT(self->acquire);
    Py_VISIT(self->release);
    Py_VISIT(self->fail);
    Py_VISIT(self->mailbox);
    Py_VISIT(self->inside);
    Py_VISIT(self->fail_message);
    Py_VISIT(self->communicator);
    Py_VISIT(self->explain);
    Py_VISIT(self->last.tensor_kind);
    return 0;
}

static int entry_clear(PyObject *object)
{
    entry *self = (entry *)object;
    Py_CLEAR(self->explain); /* enough to part them; a call may still find all the rest */
    return 0;
}

static void entry_dealloc(PyObject *object)
{
    entry *self = (entry *)object;
    PyObject_GC_UnTrack(object);
    PyObject *held[] = {self->group, self->progress, self->queue, self->acquire, self->release, self->fail,
                        self->mailbox, self->inside, self->fail_message, self->communicator, self->explain, self->last.site.code, self->last.site.instruction,
                        self->last.tensor_kind, self->recorded_by};
    for (size_t i = 0; i < sizeof held / sizeof *held; i++)
        Py_XDECREF(held[i]);
    free(self->pointers);
    entry_free_object(object);
}

static PyObject *entry_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"group", "comm", "rank", "size", "progress", "communicator", NULL};
    PyObject *group, *progress, *communicator;
    unsigned long long comm;
    unsigned int rank, size;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OKIIOO", names, &group, &comm, &rank, &size, &progress,
                                     &communicator))
        return NULL;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    entry *self = (entry *)allocate(type, 0);
    if (!self)
        return NULL;
    PyObject *running = PyObject_GetAttrString(progress, "running");
    Py_INCREF(progress);
    Py_INCREF(communicator);
    self->comm = (phx_comm *)(uintptr_t)comm;
    self->forks = entry_forks;
    self->rank = rank;
    self->size = size;
    self->progress = progress;
    self->communicator = communicator;
    self->group = PyWeakref_NewRef(group, NULL);
    self->queue = PyObject_GetAttrString(progress, "queue");
    self->acquire = running ? PyObject_GetAttrString(running, "acquire") : NULL;
    self->release = running ? PyObject_GetAttrString(running, "release") : NULL;
    self->fail = PyObject_GetAttrString(communicator, "_fail");
    self->mailbox = PyObject_GetAttrString(communicator, "_mailbox");
    self->inside = self->mailbox ? PyObject_GetAttrString(self->mailbox, "inside") : NULL;
    self->fail_message = self->mailbox ? PyObject_GetAttrString(self->mailbox, "fail_recv") : NULL;
    self->pointers = calloc(size, sizeof *self->pointers);
    for (int i = 0; i < ENTRY_SHAPES; i++)
        self->shapes.known[i].ndim = -1;
    Py_XDECREF(running);
    if (self->group && self->queue && self->acquire && self->release && self->fail && self->fail_message &&
        self->inside && PyList_CheckExact(self->inside) && self->pointers)
        return (PyObject *)self;
    Py_DECREF(self);
    return PyErr_Occurred() ? NULL : PyErr_NoMemory();
}

static PyObject *entry_set_explain(PyObject *object, PyObject *explain)
{
    entry *self = (entry *)object;
    PyObject *old = self->explain;
    Py_INCREF(explain);
    self->explain = explain;
    Py_XDECREF(old);
    Py_RETURN_NONE;
}

static PyObject *entry_set_recorded(PyObject *object, PyObject *args)
{
    entry *self = (entry *)object;
    unsigned long long group;
    PyObject *keeper;
    if (!PyArg_ParseTuple(args, "KO", &group, &keeper))
        return NULL;
    Py_INCREF(keeper); /* for as long as the entry lives; set once */
    self->recorded = (struct phx_record_group *)(uintptr_t)group;
    self->recorded_by = keeper;
    Py_RETURN_NONE;
}

static PyObject *entry_last(PyObject *object, PyObject *ignored)
{
    const struct entry_unheard *last = &((entry *)object)->last;
    (void)ignored;
    if (!last->name)
        Py_RETURN_NONE;
    PyObject *code = last->site.code ? last->site.code : Py_None;
    PyObject *instruction = last->site.instruction ? last->site.instruction : Py_None;
    return Py_BuildValue("(OOsOiL)", code, instruction, last->name, last->tensor_kind, last->op, (long long)last->root);
}

static PyMethodDef entry_defs[] = {
    {"set_explain", entry_set_explain, METH_O, "Set what the communicator gets as its unheard call; see last()."},
    {"set_recorded", entry_set_recorded, METH_VARARGS,
     "set_recorded(address, keeper): record the calls in the group at this address, which the keeper holds. Once."},
    {"last", entry_last, METH_NOARGS, "The last call that others may not have confirmed: (code, instruction, ...)."},
    {"methods", entry_methods, METH_NOARGS, "A new dictionary of the group's quick methods."},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot entry_slots[] = {
    {Py_tp_new, entry_new},
    {Py_tp_dealloc, entry_dealloc},
    {Py_tp_traverse, entry_traverse},
    {Py_tp_clear, entry_clear},
    {Py_tp_methods, entry_defs},
    {Py_tp_doc, "Entry(group, comm, rank, size, progress, communicator): the quick calls of one process group."},
    {0, NULL},
};
static PyType_Spec entry_spec = {
    "phalanx.native.entry.Entry", sizeof(entry), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, entry_slots,
};

/* -- what is the same for all groups ----------------------------------------------------------------------------------- */

static void *address(PyObject *functions, const char *name)
{
    PyObject *number = PyDict_GetItemString(functions, name); /* borrowed */
    return number ? PyLong_AsVoidPtr(number) : NULL;
}

static int set_core(PyObject *functions)
{
    struct entry_core *core = &entry_process.core;
    core->all_reduce = (__typeof__(core->all_reduce))address(functions, "phx_all_reduce");
    core->reduce = (__typeof__(core->reduce))address(functions, "phx_reduce");
    core->reduce_scatter = (__typeof__(core->reduce_scatter))address(functions, "phx_reduce_scatter");
    core->broadcast = (__typeof__(core->broadcast))address(functions, "phx_broadcast");
    core->all_gather = (__typeof__(core->all_gather))address(functions, "phx_all_gather");
    core->barrier = (__typeof__(core->barrier))address(functions, "phx_barrier");
    core->send_now = (__typeof__(core->send_now))address(functions, "phx_send_now");
    core->recv = (__typeof__(core->recv))address(functions, "phx_recv");
    core->messages_met = (__typeof__(core->messages_met))address(functions, "phx_messages_met");
    core->message_wait = (__typeof__(core->message_wait))address(functions, "phx_message_wait");
    core->message_free = (__typeof__(core->message_free))address(functions, "phx_message_free");
    if (core->all_reduce && core->reduce && core->reduce_scatter && core->broadcast && core->all_gather &&
        core->barrier && core->send_now && core->recv && core->messages_met && core->message_wait &&
        core->message_free)
        return 0;
    if (!PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "the address of a function of the core is missing");
    return -1;
}

static PyObject *set_exchange(PyObject *module, PyObject *args)
{
    PyObject *capsule, *functions;
    struct entry_tensors *tensors = &entry_process.tensors;
    (void)module;
    if (!PyArg_ParseTuple(args, "OO", &capsule, &functions))
        return NULL;
    const struct dl_exchange *exchange = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (!exchange || set_core(functions))
        return NULL;
    if (exchange->version.major != 1 || !exchange->tensor_from_object) {
        PyErr_Format(PyExc_ValueError, "torch exchanges tensors by DLPack %u, or not by reference; known is 1",
                     (unsigned)exchange->version.major);
        return NULL;
    }
    tensors->exchange = exchange;
    Py_RETURN_NONE;
}

static PyObject *set_up(PyObject *module, PyObject *args)
{
    struct entry_process *process = &entry_process;
    PyObject *dtypes, *ops, *tensor, *parameter, *is_neg, *shape_word, *profiling, *modes, *is_inside;
    PyObject *send, *recv, *done_work, *done, *function_modes;
    (void)module;
    if (!PyArg_ParseTuple(args, "O!O!OOOOO!O!OOOOOO", &PyList_Type, &dtypes, &PyList_Type, &ops, &tensor, &parameter, &is_neg,
                          &shape_word, &PyDict_Type, &profiling, &PyDict_Type, &modes, &is_inside, &send, &recv,
                          &done_work, &done, &function_modes))
        return NULL;
    struct entry_tensors *tensors = &process->tensors;
    tensors->ndtypes = 0;
    for (Py_ssize_t i = 0; i < PyList_Size(dtypes) && i < ENTRY_DTYPES; i++) {
        unsigned int code, bits, lanes, reduced, copied, mask;
        if (!PyArg_ParseTuple(PyList_GetItem(dtypes, i), "IIIIII", &code, &bits, &lanes, &reduced, &copied, &mask))
            return NULL;
        tensors->dtypes[tensors->ndtypes++] = (struct entry_dtype){
            {(uint8_t)code, (uint8_t)bits, (uint16_t)lanes}, reduced, copied, mask};
    }
    for (Py_ssize_t i = 0; i < PyList_Size(ops) && i < ENTRY_OPS; i++)
        process->ops[i] = (uint32_t)PyLong_AsUnsignedLong(PyList_GetItem(ops, i));
    if (PyErr_Occurred())
        return NULL;
    PyObject *held[] = {tensor, parameter, is_neg, shape_word, profiling, modes, is_inside,
                        send, recv, done_work, done, function_modes};
    for (size_t i = 0; i < sizeof held / sizeof *held; i++)
        Py_INCREF(held[i]); /* for as long as the process lives */
    tensors->kinds[0] = tensor;
    tensors->kinds[1] = parameter;
    tensors->is_neg = is_neg;
    tensors->shape_word = shape_word;
    process->profiling = profiling;
    process->modes = modes;
    process->codes.is_inside = is_inside;
    process->send_code = send;
    process->recv_code = recv;
    process->done_work = done_work;
    process->done = done;
    process->function_modes = function_modes;
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
    if (which < 0 || which >= ENTRY_OPTION_CLASSES) {
        PyErr_SetString(PyExc_ValueError, "set_options: the number is not one of enum entry_option_class");
        return NULL;
    }
    Py_INCREF(kind);
    entry_process.options[which] =
        (struct entry_options){kind, asynchronous, timeout, op, root, part, no_timeout};
    Py_RETURN_NONE;
}

static PyObject *dtype_of(PyObject *module, PyObject *tensor)
{
    (void)module;
    return entry_dtype_of(&entry_process.tensors, tensor);
}

static PyObject *bytes_of(PyObject *module, PyObject *options)
{
    (void)module;
    return entry_bytes_of(options);
}

static PyObject *set_recorder(PyObject *module, PyObject *args)
{
    PyObject *functions, *is_inside, *number_of;
    struct entry_core *core = &entry_process.core;
    (void)module;
    if (!PyArg_ParseTuple(args, "O!OO", &PyDict_Type, &functions, &is_inside, &number_of))
        return NULL;
    Py_INCREF(is_inside); /* for as long as the process lives */
    Py_INCREF(number_of);
    core->record_begin = (__typeof__(core->record_begin))address(functions, "phx_record_begin");
    core->record_end = (__typeof__(core->record_end))address(functions, "phx_record_end");
    entry_process.codes.is_inside = is_inside;
    entry_process.codes.number_of = number_of;
    (void)entry_read_frames(&entry_process.codes, 1);
    Py_RETURN_NONE;
}

static PyObject *read_frames(PyObject *module, PyObject *wanted)
{
    (void)module;
    return PyBool_FromLong(entry_read_frames(&entry_process.codes, wanted == Py_True));
}

static PyObject *site_number(PyObject *module, PyObject *nothing)
{
    (void)module;
    (void)nothing;
    uint32_t number;
    return entry_site_number(&entry_process.codes, &number) ? NULL : PyLong_FromUnsignedLong(number);
}

static PyObject *record_begin(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    (void)module;
    if (nargs != 5)
        return PyErr_Format(PyExc_TypeError, "record_begin(group, what, nbytes, site, peer)");
    struct phx_record_group *group = PyLong_AsVoidPtr(args[0]);
    const uint32_t what = (uint32_t)PyLong_AsUnsignedLong(args[1]), site = (uint32_t)PyLong_AsUnsignedLong(args[3]);
    const uint64_t nbytes = PyLong_AsUnsignedLongLong(args[2]);
    const long peer = PyLong_AsLong(args[4]);
    if (PyErr_Occurred())
        return NULL;
    return PyLong_FromUnsignedLongLong(entry_process.core.record_begin(group, what, nbytes, site, (int32_t)peer));
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
    entry_process.core.record_end(ticket, failed);
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"set_recorder", set_recorder, METH_VARARGS, "set_recorder(addresses, is_inside, number_of): see diagnosis/recorder.py"},
    {"site_number", site_number, METH_NOARGS, "The recorder's number of the line of the user's program that calls; 0: none."},
    {"read_frames", read_frames, METH_O,
     "read_frames(wanted): from now on find lines without objects of frames, or not; whether that is so, where it can be."},
    {"record_begin", (PyCFunction)(void (*)(void))record_begin, METH_FASTCALL, "The core's phx_record_begin()."},
    {"record_end", (PyCFunction)(void (*)(void))record_end, METH_FASTCALL, "The core's phx_record_end()."},
    {"set_exchange", set_exchange, METH_VARARGS, "set_exchange(capsule, addresses): torch's exchange, the core's functions."},
    {"set_up", set_up, METH_VARARGS, "set_up(dtypes, ops, Tensor, ...): see c10d/quick.py"},
    {"set_options", set_options, METH_VARARGS, "set_options(which, class, asyncOp, timeout, op, root, part, no timeout)"},
    {"dtype_of", dtype_of, METH_O, "dtype_of(tensor): its dtype as DLPack's (code, bits, lanes)."},
    {"bytes_of", bytes_of, METH_O, "bytes_of(options): the C++ object behind one of pybind11's, as bytes."},
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
    entry_process.is_profiling = PyUnicode_InternFromString("_is_profiler_enabled");
    entry_process.in_mode = PyUnicode_InternFromString("_is_in_torch_dispatch_mode");
    entry_process.busy = PyUnicode_InternFromString("busy");
    entry_process.unheard = PyUnicode_InternFromString("_unheard");
    entry_process.ended = PyUnicode_InternFromString("ended");
    entry_process.comm = PyUnicode_InternFromString("comm");
    entry_process.tensors.shape = PyUnicode_InternFromString("shape");
    PyObject *recorded = entry_make_recorded();
    if (!recorded || PyModule_AddObject(module, "Recorded", recorded) ||
        entry_find_frames(&entry_process.codes) || entry_make_methods() || !entry_type || pthread_atfork(NULL, NULL, count_fork) ||
        PyModule_AddObject(module, "Entry", (PyObject *)entry_type) || PyModule_AddIntConstant(module, "ABI", PHX_ABI)) {
        Py_DECREF(module);
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    }
    return module;
}
