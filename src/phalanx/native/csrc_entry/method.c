/* A group's methods: each does the usual call in C and hands all others to the class's own method. */
#include <stddef.h>

#include "entry.h"

/* An object of its own and not a built-in function: pybind11 takes a built-in for its own method, and would call the
 * C++ one in its place where C++ asks for the group's. */
typedef struct {
    struct entry_callable base;
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
static PyObject *call_python(method *self, PyObject *const *args, Py_ssize_t nargs, PyObject *names)
{
    PyObject *group = PyWeakref_GetObject(self->entry->group); /* borrowed */
    if (!group || group == Py_None) {
        PyErr_SetString(PyExc_ReferenceError, "the process group of this method no longer exists");
        return NULL;
    }
    Py_INCREF(group);
    const Py_ssize_t named = names ? PyTuple_Size(names) : 0;
    PyObject *function = PyObject_GetAttr((PyObject *)Py_TYPE(group), self->name);
    PyObject *given = PyTuple_New(nargs + 1), *keywords = named ? PyDict_New() : NULL, *result = NULL;
    if (!function || !given || (named && !keywords))
        goto done;
    Py_INCREF(group);
    PyTuple_SetItem(given, 0, group);
    for (Py_ssize_t i = 0; i < nargs; i++) {
        Py_INCREF(args[i]);
        PyTuple_SetItem(given, i + 1, args[i]);
    }
    for (Py_ssize_t i = 0; i < named; i++)
        if (PyDict_SetItem(keywords, PyTuple_GetItem(names, i), args[nargs + i]))
            goto done;
    result = PyObject_Call(function, given, keywords);
done:
    Py_XDECREF(function);
    Py_XDECREF(given);
    Py_XDECREF(keywords);
    Py_DECREF(group);
    return result;
}

static PyObject *method_vectorcall(PyObject *object, PyObject *const *args, size_t flagged, PyObject *names)
{
    method *self = (method *)object;
    const Py_ssize_t nargs = ENTRY_NARGS(flagged), named = names ? PyTuple_Size(names) : 0;
    /* torch.distributed gives the options by position, except for a barrier's. */
    const int usual = !named || (named == 1 && PyUnicode_CompareWithASCIIString(PyTuple_GetItem(names, 0), "opts") == 0);
    PyObject *result = usual ? self->quick(self->entry, self->kind, args, nargs + named) : ENTRY_NOT_ME;
    return result == ENTRY_NOT_ME ? call_python(self, args, nargs, names) : result;
}

void entry_free_object(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
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
    entry_free_object(object);
}

PyMemberDef entry_callable_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(struct entry_callable, vectorcall), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};
static PyType_Slot method_slots[] = {
    {Py_tp_dealloc, method_dealloc},
    {Py_tp_traverse, method_traverse}, /* a queued call may hold the group, and is held by its queue */
    {Py_tp_call, PyVectorcall_Call},
    {Py_tp_members, entry_callable_members},
    {Py_tp_doc, "A method of one process group that does the usual call in C and hands all others to the class's."},
    {0, NULL},
};
static PyType_Spec method_spec = {
    "phalanx.native.entry.Method", sizeof(method), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC |
        ENTRY_HAVE_VECTORCALL,
    method_slots,
};
static PyTypeObject *method_type;

int entry_make_methods(void)
{
    method_type = (PyTypeObject *)PyType_FromSpec(&method_spec);
    return method_type ? 0 : -1;
}

PyObject *entry_methods(PyObject *object, PyObject *ignored)
{
    PyObject *all = PyDict_New();
    (void)ignored;
    for (size_t i = 0; all && i < sizeof METHODS / sizeof *METHODS; i++) {
        allocfunc allocate = (allocfunc)PyType_GetSlot(method_type, Py_tp_alloc);
        method *made = (method *)allocate(method_type, 0);
        if (made) {
            Py_INCREF(object);
            made->base.vectorcall = method_vectorcall;
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
